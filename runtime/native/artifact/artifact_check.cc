// Checks that the tables of an artifact hold possible values, and that its files are those that the tables name.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "artifact/artifact.h"
#include "artifact/check_text.h"
#include "core/crc32.h"

namespace llmc {
namespace {

constexpr uint32_t kMaxNameBytes = 255;         // longest name of a target or a file
constexpr uint32_t kMaxCodeFiles = 16;          // each file stays open
constexpr uint32_t kMaxSide = 1u << 24;         // bound on any count of tokens, sequences, blocks of one graph
constexpr uint32_t kFirstVersionOfTotals = 8;
constexpr uint32_t kFirstVersionOfPlacedRows = 13;
constexpr uint64_t kMaxInputBytes = 1ull << 32;
constexpr uint64_t kMaxArenaBytes = 1ull << 42;
constexpr uint64_t kMaxBlockBytes = 1ull << 51;  // of one layer
constexpr uint64_t kMaxReplayedCommands = 1ull << 26;
constexpr int32_t kMaxStatesWidth = 1 << 20;
constexpr uint32_t kMaxAdapterSlots = 256, kMaxAdapterRank = 512;

enum DType : uint32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kI8 = 3,
  kU8 = 4,
  kI32 = 5,
  kFp8E4m3 = 6,
  kFp8E5m2 = 7,
  kNumDTypes = 8
};
constexpr uint64_t kDTypeBytes[kNumDTypes] = {4, 2, 2, 1, 1, 4, 1, 1};

bool Between(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

// Whether a name is a plain file name: an artifact must not lead anyone outside its folder.
bool IsFileName(const std::string& name) {
  const auto plain = [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  };
  return !name.empty() && name.size() <= 255 && plain(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(),
                     [&](unsigned char c) { return plain(c) || c == '.' || c == '_' || c == '-'; });
}

// Number of operands of a collective: input, added ones and output; or what is passed on.
uint32_t OperandsOf(const CollectiveRecord& collective) {
  if (collective.op == static_cast<uint32_t>(CollectiveOp::kPassOn)) return 1;
  return 2 + (collective.adds & kAddsBias ? 1 : 0) + (collective.adds & kAddsResidual ? 1 : 0);
}

}  // namespace

uint64_t DTypeBytes(int32_t dtype) { return kDTypeBytes[dtype]; }

Status Artifact::ReadString(uint32_t offset, uint32_t length, const char* what, std::string* out) const {
  if (length == 0 || length > kMaxNameBytes || !InRange(offset, length, strings_.size()) ||
      std::memchr(strings_.data() + offset, 0, length) != nullptr) {
    return Corrupt("graphs.bin", std::string("the ") + what + " is not a valid name at " + Str(offset) + "+" +
                                     Str(length) + " of " + Str(uint64_t{strings_.size()}) + " string bytes");
  }
  out->assign(strings_, offset, length);
  return Status::Ok();
}

Status Artifact::CheckTarget() {
  const TargetRecord& t = target_record_;
  LLMC_RETURN_IF_ERROR(ReadString(t.kind_offset, t.kind_length, "target's kind", &target_.kind));
  LLMC_RETURN_IF_ERROR(ReadString(t.name_offset, t.name_length, "target's name", &target_.name));
  LLMC_RETURN_IF_ERROR(ReadString(t.layout_offset, t.layout_length, "target's layout", &target_.layout));
  target_.level = t.level;
  return Status::Ok();
}

// Checks that the code files are whole. Their contents are for devices to check.
Status Artifact::CheckCode() {
  if (!Between(static_cast<int64_t>(code_.size()), 1, kMaxCodeFiles)) {
    return Corrupt("graphs.bin",
                   "it names " + Str(uint64_t{code_.size()}) + " code files, outside 1 … " + Str(kMaxCodeFiles));
  }
  for (const CodeRecord& code : code_) {
    std::string name;
    LLMC_RETURN_IF_ERROR(ReadString(code.name_offset, code.name_length, "name of a code file", &name));
    if (!IsFileName(name)) return Corrupt("graphs.bin", "a code file is called '" + name + "'");
    MappedFile file;
    LLMC_RETURN_IF_ERROR(MappedFile::Open(directory_ + "/" + name, &file));
    if (file.size() != code.bytes) {
      return Corrupt(name, "it has " + Str(file.size()) + " bytes and graphs.bin expects " + Str(code.bytes));
    }
    const uint32_t crc = Crc32(file.data(), file.size());
    if (crc != code.crc32) return Corrupt(name, "its CRC-32 is " + Hex(crc) + ", not " + Hex(code.crc32));
    code_files_.push_back(std::move(file));
  }
  return Status::Ok();
}

Status Artifact::CheckModel() {
  const ModelRecord& m = model_;
  const int32_t most_use = version_ < kFirstVersionOfPlacedRows ? LLMC_STATES_TAKEN : LLMC_STATES_PLACED_ON_AXES;
  const struct {
    const char* name;
    int32_t value, low, high;
  } fields[] = {
      {"num_layers", m.num_layers, 1, 1 << 16},
      {"num_kv_heads", m.num_kv_heads, 1, 1 << 16},
      {"head_dim", m.head_dim, 1, 1 << 16},
      {"block_size", m.block_size, 16, 1 << 16},
      {"kv_dtype", m.kv_dtype, 0, kNumDTypes - 1},
      {"vocab_size", m.vocab_size, 1, 1 << 28},
      {"max_model_len", m.max_model_len, 1, 1 << 28},
      {"max_num_seqs", m.max_num_seqs, 1, 1 << 20},
      {"act_dtype", m.act_dtype, 0, kNumDTypes - 1},
      {"sliding_window", m.sliding_window, 0, INT32_MAX},
      {"num_eos", m.num_eos, 0, 8},
      {"vector_width", m.vector_width, 0, 1 << 28},
      {"whole_prompts", m.whole_prompts, 0, 1},
      {"adapter_slots", m.adapter_slots, 0, kMaxAdapterSlots},
      {"adapter_rank", m.adapter_rank, 0, kMaxAdapterRank},
      {"states_width", m.states_width, 0, kMaxStatesWidth},
      {"takes_states", m.takes_states, 0, m.states_width > 0 ? most_use : LLMC_STATES_LEFT},
  };
  for (const auto& field : fields) {
    if (!Between(field.value, field.low, field.high)) {
      return Corrupt("graphs.bin", std::string("the model's ") + field.name + " is " + Str(field.value) + ", outside " +
                                       Str(field.low) + " … " + Str(field.high));
    }
  }
  if (m.kv_dtype == kU8 || m.kv_dtype == kI32) {
    return Corrupt("graphs.bin", "the model's kv_dtype is " + Str(m.kv_dtype) + ", which no KV cache has");
  }
  if (m.block_size % 16 != 0) {
    return Corrupt("graphs.bin", "block_size " + Str(m.block_size) + " is not a multiple of 16");
  }
  // Values that are part of their keys have no bytes of their own.
  if (m.key_block_bytes < 1 || m.key_block_bytes > kMaxBlockBytes || m.value_block_bytes > kMaxBlockBytes) {
    return Corrupt("graphs.bin", "a KV block of one layer has " + Str(m.key_block_bytes) + " bytes of keys and " +
                                     Str(m.value_block_bytes) + " of values");
  }
  uint64_t most_bytes = 0;
  if (__builtin_mul_overflow(m.key_block_bytes + m.value_block_bytes, uint64_t(m.num_layers), &most_bytes)) {
    return Corrupt("graphs.bin", "one KV block of " + Str(m.num_layers) + " layers overflows 64 bits");
  }
  shape_ = {m.num_layers, m.block_size, m.vocab_size, m.max_model_len, m.max_num_seqs, {}, 0, {}};
  shape_.vector_width = m.vector_width;
  shape_.whole_prompts = m.whole_prompts != 0;
  shape_.adapter_slots = static_cast<uint32_t>(m.adapter_slots);
  shape_.states_width = m.states_width;
  shape_.takes_states = m.takes_states != LLMC_STATES_LEFT;
  shape_.places_rows = m.takes_states >= LLMC_STATES_PLACED;
  shape_.rope_axes = m.takes_states == LLMC_STATES_PLACED_ON_AXES ? kRopeAxes : 0;
  for (int32_t i = 0; i < m.num_eos; ++i) {
    if (m.eos[i] < 0) return Corrupt("graphs.bin", "eos token " + Str(m.eos[i]) + " is negative");
    // An id outside the vocabulary is never sampled and must not index a row of logits.
    if (m.eos[i] < m.vocab_size) shape_.eos_token_ids.push_back(m.eos[i]);
  }
  return Status::Ok();
}

Status Artifact::CheckKernels() const {
  for (size_t i = 0; i < kernels_.size(); ++i) {
    const KernelRecord& kernel = kernels_[i];
    const std::string name = "kernel " + Str(uint64_t{i});
    // The NUL after the symbol is part of the string section, too.
    if (kernel.symbol_length == 0 ||
        !InRange(kernel.symbol_offset, uint64_t{kernel.symbol_length} + 1, strings_.size()) ||
        std::memchr(strings_.data() + kernel.symbol_offset, 0, kernel.symbol_length) != nullptr ||
        strings_[uint64_t{kernel.symbol_offset} + kernel.symbol_length] != '\0') {
      return Corrupt("graphs.bin", name + " has no valid symbol at " + Str(kernel.symbol_offset) + "+" +
                                       Str(kernel.symbol_length) + " of " + Str(uint64_t{strings_.size()}) +
                                       " string bytes");
    }
    if (kernel.code >= code_.size()) {
      return Corrupt("graphs.bin",
                     name + " is in code file " + Str(kernel.code) + " of " + Str(uint64_t{code_.size()}));
    }
    if (!Between(kernel.num_buffers, 1, kMaxBuffers)) {
      return Corrupt("graphs.bin", name + " takes " + Str(kernel.num_buffers) + " buffers, outside 1 … 12");
    }
    if (kernel.family >= kNumFamilies) {
      return Corrupt("graphs.bin", name + " has unknown family " + Str(kernel.family));
    }
  }
  return Status::Ok();
}

std::string Artifact::WeightName(const WeightRecord& weight) const {
  return "weight '" + strings_.substr(weight.name_offset, std::min(weight.name_length, 200u)) + "'";
}

Status Artifact::CheckWeights() {
  const uint64_t size = weight_file_.size();
  if (size != weights_bytes_) {
    return Corrupt("weights.safetensors",
                   "it has " + Str(size) + " bytes and graphs.bin expects " + Str(weights_bytes_));
  }
  uint64_t header_bytes = 0;
  if (size >= sizeof(header_bytes)) std::memcpy(&header_bytes, weight_file_.data(), sizeof(header_bytes));
  if (size < sizeof(header_bytes) || !InRange(sizeof(header_bytes), header_bytes, size)) {
    return Corrupt("weights.safetensors", "it has " + Str(size) + " bytes, too few for its header");
  }
  weights_header_bytes_ = sizeof(header_bytes) + header_bytes;
  const uint32_t crc = Crc32(weight_file_.data(), weights_header_bytes_);
  if (crc != weights_header_crc32_) {
    return Corrupt("weights.safetensors",
                   "the CRC-32 of its header is " + Hex(crc) + ", not " + Hex(weights_header_crc32_));
  }
  uint64_t end = weights_header_bytes_;  // end of the bytes before the next tensor
  for (size_t i = 0; i < weights_.size(); ++i) {
    const WeightRecord& weight = weights_[i];
    if (!InRange(weight.name_offset, weight.name_length, strings_.size())) {
      return Corrupt("graphs.bin", "weight " + Str(uint64_t{i}) + " has its name outside the strings");
    }
    const std::string name = WeightName(weight);
    if (!InRange(weight.layout_offset, weight.layout_length, strings_.size())) {
      return Corrupt("graphs.bin", name + " has its layout outside the strings");
    }
    if (weight.dtype >= kNumDTypes) return Corrupt("graphs.bin", name + " has unknown dtype " + Str(weight.dtype));
    if (weight.rank > 4) return Corrupt("graphs.bin", name + " has rank " + Str(weight.rank) + ", more than 4");
    uint64_t bytes = kDTypeBytes[weight.dtype];
    for (uint32_t d = 0; d < weight.rank; ++d) {
      if (weight.shape[d] < 1 || __builtin_mul_overflow(bytes, uint64_t(weight.shape[d]), &bytes)) {
        return Corrupt("graphs.bin", name + " has an impossible shape");
      }
    }
    if (bytes != weight.bytes) {
      return Corrupt("graphs.bin", name + " has " + Str(weight.bytes) + " bytes and a shape of " + Str(bytes));
    }
    if (weight.file_offset % kAlignment != 0) {
      return Corrupt("graphs.bin", name + " starts at " + Str(weight.file_offset) + ", no multiple of 64");
    }
    if (weight.file_offset < end) {
      return Corrupt("graphs.bin", name + " starts at " + Str(weight.file_offset) + ", before byte " + Str(end) +
                                       " where what precedes it ends");
    }
    if (!InRange(weight.file_offset, weight.bytes, size)) {
      return Corrupt("graphs.bin", name + " is at " + Str(weight.file_offset) + "+" + Str(weight.bytes) +
                                       " of weights.safetensors, which has " + Str(size) + " bytes");
    }
    end = weight.file_offset + weight.bytes;
  }
  return Status::Ok();
}

Status Artifact::CheckAdapters() {
  const ModelRecord& m = model_;
  if (adapters_.empty() != (m.adapter_slots == 0) || adapters_.empty() != (m.adapter_rank == 0)) {
    return Corrupt("graphs.bin", "it has " + Str(uint64_t{adapters_.size()}) + " pools of adapters for " +
                                     Str(m.adapter_slots) + " adapters of rank " + Str(m.adapter_rank));
  }
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const AdapterRecord& a = adapters_[i];
    const std::string name = "pool " + Str(uint64_t{i}) + " of adapters";
    if (a.weight >= weights_.size()) {
      return Corrupt("graphs.bin", name + " is of weight " + Str(a.weight) + " of " + Str(uint64_t{weights_.size()}));
    }
    if (m.act_dtype > static_cast<int32_t>(kF16))
      return Corrupt("graphs.bin", name + " has numbers of dtype " + Str(m.act_dtype));
    if (!Between(a.columns, 1, kMaxSide) || !Between(a.tile_rows, 1, 64) || !Between(a.tile_columns, 1, 4) ||
        !Between(a.num_parts, 1, kMaxAdapterParts)) {
      return Corrupt("graphs.bin", name + " has " + Str(a.columns) + " columns, tiles of " + Str(a.tile_rows) + " × " +
                                       Str(a.tile_columns) + " and " + Str(a.num_parts) + " parts");
    }
    AdapterSlot slot;
    slot.columns = a.columns, slot.tile_rows = a.tile_rows, slot.tile_columns = a.tile_columns,
    slot.num_parts = a.num_parts;
    slot.rank = static_cast<uint32_t>(m.adapter_rank), slot.dtype = static_cast<uint32_t>(m.act_dtype);
    for (uint32_t part = 0; part < a.num_parts; ++part) {
      if (!Between(a.rows[part], 1, kMaxSide)) {
        return Corrupt("graphs.bin", name + " has a part of " + Str(a.rows[part]) + " rows");
      }
      slot.rows[part] = a.rows[part];
    }
    if (slot.bytes() != a.slot_bytes) {
      return Corrupt("graphs.bin",
                     name + " has slots of " + Str(a.slot_bytes) + " bytes, its sizes take " + Str(slot.bytes()));
    }
    shape_.adapters.push_back(slot);
  }
  return Status::Ok();
}

Status Artifact::Verify() const {
  // Read rather than touched in the mapping: an unreadable sector then is an error, not a signal.
  std::vector<unsigned char> chunk(1u << 20);
  uint32_t crc = 0;
  bool zero = true;
  const auto read = [&](uint64_t offset, uint64_t bytes) {
    crc = 0;
    zero = true;
    while (bytes > 0) {
      const uint64_t count = std::min<uint64_t>(bytes, chunk.size());
      LLMC_RETURN_IF_ERROR(weight_file_.Read(offset, count, chunk.data()));
      crc = Crc32(chunk.data(), count, crc);
      zero = zero && std::all_of(chunk.data(), chunk.data() + count, [](unsigned char byte) { return byte == 0; });
      offset += count;
      bytes -= count;
    }
    return Status::Ok();
  };
  std::string first;
  uint64_t damaged = 0;
  const auto report = [&](const std::string& what) {
    if (damaged++ == 0) first = what;
  };
  const auto check_padding = [&](uint64_t begin, uint64_t end) {
    LLMC_RETURN_IF_ERROR(read(begin, end - begin));
    if (!zero) report("the padding from byte " + Str(begin) + " to " + Str(end) + " is not zero");
    return Status::Ok();
  };
  LLMC_RETURN_IF_ERROR(read(0, weights_header_bytes_));
  if (crc != weights_header_crc32_) {
    report("the CRC-32 of its header is " + Hex(crc) + ", not " + Hex(weights_header_crc32_));
  }
  uint64_t end = weights_header_bytes_;
  for (const WeightRecord& weight : weights_) {
    LLMC_RETURN_IF_ERROR(check_padding(end, weight.file_offset));
    LLMC_RETURN_IF_ERROR(read(weight.file_offset, weight.bytes));
    end = weight.file_offset + weight.bytes;
    if (crc != weight.crc32) {
      report(WeightName(weight) + " at byte " + Str(weight.file_offset) + " has CRC-32 " + Hex(crc) + ", not " +
             Hex(weight.crc32));
    }
  }
  LLMC_RETURN_IF_ERROR(check_padding(end, weight_file_.size()));
  if (damaged == 0) return Status::Ok();
  return Corrupt("weights.safetensors", damaged == 1 ? first : first + ", and " + Str(damaged - 1) + " more");
}

Status Artifact::CheckOperand(const GraphRecord& graph, uint64_t index) const {
  const OperandRecord& operand = operands_[index];
  uint64_t count = 0;      // number of valid indices of the kind
  uint64_t limit = 0;      // bytes of the buffer that the operand lies in
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena:
      count = 1;
      limit = graph.arena_bytes;
      break;
    case OperandKind::kWeight:
      count = num_named_weights();
      if (operand.index < count) limit = weights_[operand.index].bytes;
      break;
    case OperandKind::kInput:
      count = operand.index < kNumInputs && !has_input(operand.index) ? operand.index : kNumInputs;
      limit = InputTouchedBytes(graph, operand.index);
      break;
    case OperandKind::kKeyPool:
    case OperandKind::kValuePool:
      // The pool's size is known only at run time: block b is at b × bytes, with b below the scalar num_blocks. Slots of
      // states lie alike.
      count = uint64_t(model_.num_layers);
      if (operand.index >= count) break;
      limit = static_cast<OperandKind>(operand.kind) == OperandKind::kKeyPool ? key_block_bytes(operand.index)
                                                                              : value_block_bytes(operand.index);
      // Fewer bytes would be another stride: kernel and pool would disagree on where block 1 starts.
      if (operand.bytes != limit) {
        return Corrupt("graphs.bin", "operand " + Str(index) +
                                         (has_state(operand.index) ? " has slots of " : " has KV blocks of ") +
                                         Str(operand.bytes) + " bytes and those of layer " + Str(operand.index) +
                                         " have " + Str(limit));
      }
      break;
    case OperandKind::kOutput:
      count = 1;
      limit = uint64_t{graph.max_samples} * shape_.output_width() * sizeof(float);
      break;
    case OperandKind::kStates:
      count = model_.states_width > 0 ? 1 : 0;
      limit = uint64_t{graph.max_tokens} * static_cast<uint32_t>(model_.states_width) * sizeof(float);
      break;
    case OperandKind::kAdapters:
      count = adapters_.size();
      if (operand.index < count) limit = adapters_[operand.index].slot_bytes;
      // As for KV pools: slot s is at s × bytes.
      if (operand.index < count && operand.bytes != limit) {
        return Corrupt("graphs.bin", "operand " + Str(index) + " has slots of " + Str(operand.bytes) +
                                         " bytes and those of its pool have " + Str(limit));
      }
      break;
    default: return Corrupt("graphs.bin", "operand " + Str(index) + " has unknown kind " + Str(operand.kind));
  }
  // The arena has no index.
  const bool indexed = static_cast<OperandKind>(operand.kind) != OperandKind::kArena;
  if (indexed && operand.index >= count) {
    return Corrupt("graphs.bin", "operand " + Str(index) + " of kind " + Str(operand.kind) + " has index " +
                                     Str(operand.index) + " of " + Str(count));
  }
  if (operand.offset % kAlignment != 0) {
    return Corrupt("graphs.bin",
                   "operand " + Str(index) + " has offset " + Str(operand.offset) + ", no multiple of 64");
  }
  if (operand.bytes == 0 || !InRange(operand.offset, operand.bytes, limit)) {
    return Corrupt("graphs.bin", "operand " + Str(index) + " of kind " + Str(operand.kind) + " spans " +
                                     Str(operand.offset) + "+" + Str(operand.bytes) + " of " + Str(limit) + " bytes");
  }
  return Status::Ok();
}

Status Artifact::CheckCommand(const GraphRecord& graph, uint32_t index) const {
  const CommandRecord& command = commands_[index];
  const bool together = command.kernel >= kCollective;
  const uint32_t named = together ? command.kernel - kCollective : command.kernel;
  const uint64_t known = together ? collectives_.size() : kernels_.size();
  if (named >= known) {
    return Corrupt("graphs.bin", "command " + Str(index) + " names " + (together ? "collective " : "kernel ") +
                                     Str(named) + " of " + Str(known));
  }
  const uint32_t taken = together ? OperandsOf(collectives_[named]) : kernels_[named].num_buffers;
  if (command.num_operands != taken) {
    return Corrupt("graphs.bin", "command " + Str(index) + " has " + Str(command.num_operands) + " operands and its " +
                                     (together ? "collective" : "kernel") + " takes " + Str(taken));
  }
  if (!InRange(command.first_operand, command.num_operands, operands_.size())) {
    return Corrupt("graphs.bin", "command " + Str(index) + " has operands " + Str(command.first_operand) + "+" +
                                     Str(command.num_operands) + " of " + Str(uint64_t{operands_.size()}));
  }
  if (command.barrier > 1) {
    return Corrupt("graphs.bin", "command " + Str(index) + " has barrier " + Str(command.barrier));
  }
  if (!Between(command.layer, -1, model_.num_layers - 1)) {
    return Corrupt("graphs.bin",
                   "command " + Str(index) + " has layer " + Str(command.layer) + " of " + Str(model_.num_layers));
  }
  if (command.family >= kNumFamilies) {
    return Corrupt("graphs.bin", "command " + Str(index) + " has unknown family " + Str(command.family));
  }
  for (uint32_t o = 0; o < command.num_operands; ++o) {
    LLMC_RETURN_IF_ERROR(CheckOperand(graph, uint64_t{command.first_operand} + o));
  }
  if (together) LLMC_RETURN_IF_ERROR(CheckCollective(graph, index, collectives_[named]));
  return Status::Ok();
}

Status Artifact::CheckGraphs() {
  if (graphs_.empty()) return Corrupt("graphs.bin", "it has no graph");
  uint64_t replayed = 0;
  for (size_t g = 0; g < graphs_.size(); ++g) {
    const GraphRecord& graph = graphs_[g];
    const std::string name = "graph " + Str(uint64_t{g});
    const struct {
      const char* name;
      uint32_t value, low, high;
    } fields[] = {
        {"phase", graph.phase, 0, 2},
        {"batch", graph.batch, 1, kMaxSide},
        {"seq", graph.seq, 1, 1u << 28},
        {"max_tokens", graph.max_tokens, 1, kMaxSide},
        {"max_seqs", graph.max_seqs, 1, kMaxSide},
        {"max_samples", graph.max_samples, 1, kMaxSide},
        {"max_blocks_per_seq", graph.max_blocks_per_seq, 1, kMaxSide},
        {"row_unit", graph.row_unit, 1, 4096},
        {"num_commands", graph.num_commands, 1, UINT32_MAX},
    };
    for (const auto& field : fields) {
      if (!Between(field.value, field.low, field.high)) {
        return Corrupt("graphs.bin", name + " has " + field.name + " " + Str(field.value) + ", outside " +
                                         Str(field.low) + " … " + Str(field.high));
      }
    }
    const bool flat = graph.phase == static_cast<uint32_t>(Phase::kDecode) && graph.max_seqs <= graph.max_blocks &&
                      graph.max_blocks_per_seq <= graph.max_blocks;
    if (graph.max_blocks != 0 && (version_ < kFirstVersionOfTotals || !flat)) {
      return Corrupt("graphs.bin", name + " has a table of " + Str(graph.max_blocks) + " blocks in all");
    }
    if (InputBytes(graph, kBlockTables) > kMaxInputBytes) {
      return Corrupt("graphs.bin",
                     name + " has block tables of " + Str(graph.max_seqs) + " × " + Str(graph.max_blocks_per_seq));
    }
    if (uint64_t{graph.max_samples} * shape_.output_width() > kMaxArenaBytes) {
      return Corrupt("graphs.bin",
                     name + " has results of " + Str(graph.max_samples) + " × " + Str(shape_.output_width()));
    }
    if (graph.arena_bytes > kMaxArenaBytes) {
      return Corrupt("graphs.bin", name + " wants an arena of " + Str(graph.arena_bytes) + " bytes");
    }
    if (!InRange(graph.first_command, graph.num_commands, commands_.size())) {
      return Corrupt("graphs.bin", name + " has commands " + Str(graph.first_command) + "+" + Str(graph.num_commands) +
                                       " of " + Str(uint64_t{commands_.size()}));
    }
    replayed += graph.num_commands;
    if (replayed > kMaxReplayedCommands) return Corrupt("graphs.bin", "its graphs have too many commands");
    for (uint32_t c = graph.first_command; c < graph.first_command + graph.num_commands; ++c) {
      LLMC_RETURN_IF_ERROR(CheckCommand(graph, c));
    }
    if (!stages_.empty()) LLMC_RETURN_IF_ERROR(CheckOrderOfStages(graph, name));
    max_arena_bytes_ = std::max(max_arena_bytes_, graph.arena_bytes);
    shape_.graphs.push_back({static_cast<Phase>(graph.phase), graph.batch, graph.seq, graph.max_tokens, graph.max_seqs,
                             graph.max_samples, graph.max_blocks_per_seq, graph.max_blocks});
  }
  return Status::Ok();
}

}  // namespace llmc
