// Artifact: an opened, validated artifact directory (FORMAT.md). Its code is opaque here; devices interpret it.
// Immutable and shared.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "artifact/adapter_slot.h"
#include "artifact/model_shape.h"
#include "core/mapped_file.h"
#include "core/status.h"

namespace llmc {

constexpr uint32_t kMaxBuffers = 12;
constexpr uint32_t kNumFamilies = 8;
constexpr uint32_t kNumInputs = 11;
constexpr uint64_t kAlignment = 64;
constexpr uint32_t kMaxLaunchFacts = 7;
constexpr uint32_t kCollective = 1u << 31;  // added to the index of a collective in a command
constexpr int32_t kMaxRanks = 256;

// Bytes of an element. dtype: a code of FORMAT.md.
uint64_t DTypeBytes(int32_t dtype);

enum class OperandKind : uint32_t {
  kArena = 0,
  kWeight = 1,
  kInput = 2,
  kKeyPool = 3,
  kValuePool = 4,
  kOutput = 5,
  kAdapters = 6,
  kStates = 7
};
enum class CollectiveOp : uint32_t { kAllReduce = 0, kAllGather = 1, kPassOn = 2 };
enum class CollectiveRows : uint32_t { kTokens = 0, kSamples = 1 };
constexpr uint32_t kAddsBias = 1, kAddsResidual = 2;  // bits of CollectiveRecord.adds
enum Input : uint32_t {
  kInputIds = 0,
  kPositions = 1,
  kSlotMapping = 2,
  kBlockTables = 3,
  kContextLens = 4,
  kQueryStart = 5,
  kSampleIndex = 6,
  kTokenSeq = 7,
  kAdapterTiles = 8,
  kStateSlots = 9,
  kRopePositions = 10
};

// Records of graphs.bin, byte for byte.
struct ModelRecord {
  int32_t num_layers, num_kv_heads, head_dim, block_size, kv_dtype, vocab_size, max_model_len, max_num_seqs;
  int32_t act_dtype, sliding_window, num_eos, eos[8], bos;
  uint64_t key_block_bytes, value_block_bytes;  // of one KV block of one layer, the most of any layer
  int32_t vector_width, whole_prompts, adapter_slots, adapter_rank, num_ranks, num_shared_weights;
  int32_t states_width, takes_states;  // takes_states: LLMC_STATES_
};
struct KernelRecord {
  uint32_t symbol_offset, symbol_length, num_buffers, family, code, launch[kMaxLaunchFacts];
};
struct WeightRecord {
  uint32_t name_offset, name_length, dtype, rank;
  uint64_t file_offset, bytes;
  int64_t shape[4];
  uint32_t crc32, layout_offset, layout_length, reserved;
};
struct GraphRecord {
  uint32_t phase, batch, seq, max_tokens, max_seqs, max_samples, max_blocks_per_seq, row_unit, first_command;
  uint32_t num_commands;
  uint64_t arena_bytes;
  uint32_t max_blocks, reserved[3];
};
struct CommandRecord {
  uint32_t kernel, first_operand, num_operands, barrier;
  int32_t layer;
  uint32_t family;
};
struct OperandRecord {
  uint32_t kind, index;
  uint64_t offset, bytes;
};
struct TargetRecord {
  uint32_t kind_offset, kind_length, name_offset, name_length, layout_offset, layout_length, level, reserved;
};
struct CodeRecord {
  uint32_t name_offset, name_length, crc32, reserved;
  uint64_t bytes;
};
struct AdapterRecord {
  uint32_t weight, columns, tile_rows, tile_columns, num_parts, rows[kMaxAdapterParts], reserved;
  uint64_t slot_bytes;
};
struct CollectiveRecord {
  uint32_t op, rows, width, adds, stage, reserved[3];
};
struct StageRecord {
  uint32_t first_layer, num_layers;  // of the KV cache
};
struct KvLayerRecord {
  uint64_t key_block_bytes, value_block_bytes;  // of one KV block of the layer
};
struct StateLayerRecord {
  uint32_t layer, reserved;  // a layer of the KV cache that holds a state
};
static_assert(sizeof(ModelRecord) == 128 && sizeof(KernelRecord) == 48 && sizeof(WeightRecord) == 80 &&
                  sizeof(GraphRecord) == 64 && sizeof(CommandRecord) == 24 && sizeof(OperandRecord) == 24 &&
                  sizeof(TargetRecord) == 32 && sizeof(CodeRecord) == 24 && sizeof(AdapterRecord) == 64 &&
                  sizeof(CollectiveRecord) == 32 && sizeof(StageRecord) == 8 && sizeof(KvLayerRecord) == 16 &&
                  sizeof(StateLayerRecord) == 8,
              "records have the sizes of FORMAT.md");

// Record of a tile in input kAdapterTiles, after the number of tiles: the slot of its adapter, its number of rows, the
// rows.
constexpr uint32_t kTileRows = 8;
constexpr uint32_t kTileRecord = 2 + kTileRows;

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bytes of input `index` of a graph that a kernel may touch.
uint64_t InputTouchedBytes(const GraphRecord& graph, uint32_t index);
// The same, rounded up to whole cache lines.
uint64_t InputBytes(const GraphRecord& graph, uint32_t index);

// The target of an artifact's code.
struct TargetFacts {
  // kind of device that loads it; name of the target; layout of activations and KV cache
  std::string kind, name, layout;
  uint32_t level = 0;              // least level of the device, in its kind's numbering
};

class Artifact {
 public:
  Artifact() = default;
  Artifact(const Artifact&) = delete;
  Artifact& operator=(const Artifact&) = delete;

  static Status Open(const std::string& directory, std::shared_ptr<const Artifact>* out);
  // Reads the whole weights.safetensors and compares every tensor with its CRC-32; all other bytes must be zero.
  Status Verify() const;

  // Whether this artifact is `older` plus graphs and kernels appended: the same model, weights, numbers.
  Status CheckExtends(const Artifact& older) const;

  // A number of all that graphs.bin says of KV blocks and of what makes them: runtime, target, shape of the model and
  // weights, not buckets. Artifacts with other numbers have other bits, or other places for them. Equal numbers are no
  // proof: how layers multiply, by rounded activations or not, stands in the manifest alone, which servers compare.
  uint64_t KvIdentity() const;
  // A number that two artifacts share if their tables, weights and code are the same bytes, and so are their runtimes.
  // Weights and code count by their checksums in the tables.
  uint64_t Identity() const;

  const ModelRecord& model() const { return model_; }
  const ModelShape& shape() const { return shape_; }
  const std::vector<KernelRecord>& kernels() const { return kernels_; }
  const std::vector<WeightRecord>& weights() const { return weights_; }
  const std::vector<GraphRecord>& graphs() const { return graphs_; }
  const std::vector<CommandRecord>& commands() const { return commands_; }
  const std::vector<OperandRecord>& operands() const { return operands_; }
  const std::vector<CodeRecord>& code() const { return code_; }
  const std::vector<AdapterRecord>& adapters() const { return adapters_; }
  const std::vector<CollectiveRecord>& collectives() const { return collectives_; }
  const std::vector<StageRecord>& stages() const { return stages_; }
  // A stage has some of the layers. Its ranks share each of them, and hand their results to those of the next stage.
  // Ranks are numbered stage by stage.
  uint32_t num_stages() const { return stages_.empty() ? 1 : static_cast<uint32_t>(stages_.size()); }
  uint32_t ranks_of_stage() const { return model_.num_ranks == 0 ? 1 : static_cast<uint32_t>(model_.num_ranks); }
  uint32_t stage_of(uint32_t rank) const { return rank / ranks_of_stage(); }
  // Layers of the KV cache whose pools a rank of the stage has.
  StageRecord layers_of(uint32_t stage) const {
    return stages_.empty() ? StageRecord{0, static_cast<uint32_t>(model_.num_layers)} : stages_[stage];
  }
  // Bytes of one KV block of a layer of the KV cache, or of one slot.
  KvLayerRecord kv_layer(uint32_t layer) const {
    return kv_layers_.empty() ? KvLayerRecord{model_.key_block_bytes, model_.value_block_bytes} : kv_layers_[layer];
  }
  // Whether a layer of the KV cache has a state in place of keys and values: its pools have slots in place of blocks,
  // of as many bytes as kv_layer says.
  bool has_state(uint32_t layer) const;
  // Whether graphs have the input.
  bool has_input(uint32_t index) const {
    if (index == kAdapterTiles) return !adapters_.empty();
    if (index == kStateSlots) return !state_layers_.empty();
    return index == kRopePositions ? shape_.rope_axes > 0 : index < kNumInputs;
  }
  uint64_t key_block_bytes(uint32_t layer) const { return kv_layer(layer).key_block_bytes; }
  uint64_t value_block_bytes(uint32_t layer) const { return kv_layer(layer).value_block_bytes; }
  // Which named weights a stage's commands read.
  std::vector<bool> WeightsOf(uint32_t stage) const;
  // Ranks that run a step together, of all stages.
  uint32_t num_ranks() const { return num_stages() * ranks_of_stage(); }
  // Bytes of the file that one rank reads; the most of any.
  uint64_t rank_weight_bytes() const;
  // Most bytes that a rank passes on in a step; 0 without stages.
  uint64_t passed_bytes() const;
  uint32_t num_shared_weights() const { return static_cast<uint32_t>(model_.num_shared_weights); }
  // Weights that operands may name: the shared ones, then those of one rank.
  uint32_t num_named_weights() const {
    const uint32_t shared = num_shared_weights();
    return shared + (static_cast<uint32_t>(weights_.size()) - shared) / ranks_of_stage();
  }
  // Index of the weight record that an operand of `rank` names.
  uint32_t weight_of(uint32_t named, uint32_t rank) const {
    const uint32_t shared = num_shared_weights();
    return named < shared ? named : named + rank % ranks_of_stage() * (num_named_weights() - shared);
  }
  // The collective of a command; nullptr if the command calls a kernel.
  const CollectiveRecord* collective(const CommandRecord& command) const {
    return command.kernel < kCollective ? nullptr : &collectives_[command.kernel - kCollective];
  }
  const MappedFile& code_file(std::size_t index) const { return code_files_[index]; }
  const MappedFile& weight_file() const { return weight_file_; }
  const std::string& directory() const { return directory_; }
  const TargetFacts& target() const { return target_; }

  // Symbol of a kernel of this artifact, terminated by a NUL.
  const char* symbol(const KernelRecord& kernel) const { return strings_.data() + kernel.symbol_offset; }
  std::string code_name(const CodeRecord& code) const { return strings_.substr(code.name_offset, code.name_length); }
  uint64_t code_bytes() const;
  std::string weight_name(uint32_t index) const {
    return strings_.substr(weights_[index].name_offset, weights_[index].name_length);
  }
  // An error that names the damaged file of this artifact and the damage.
  Status Corrupt(const std::string& file, const std::string& what) const;
  uint64_t max_arena_bytes() const { return max_arena_bytes_; }

 private:
  Status ReadTables(const MappedFile& file);
  Status CheckTarget();
  Status CheckModel();
  Status CheckCode();
  Status CheckKernels() const;
  Status CheckWeights();
  Status CheckAdapters();
  Status CheckStages() const;
  Status CheckStateLayers() const;
  Status CheckKvLayers();
  uint64_t LayerBytes(bool states) const;
  uint64_t MostEntries(bool states) const;
  Status CheckRanks() const;
  Status CheckCollective(const GraphRecord& graph, uint32_t index, const CollectiveRecord& collective) const;
  Status CheckOrderOfStages(const GraphRecord& graph, const std::string& name) const;
  Status CheckGraphs();
  Status CheckCommand(const GraphRecord& graph, uint32_t index) const;
  Status CheckOperand(const GraphRecord& graph, uint64_t index) const;
  Status ReadString(uint32_t offset, uint32_t length, const char* what, std::string* out) const;
  std::string WeightName(const WeightRecord& weight) const;

  std::string directory_;
  uint32_t version_ = 0;        // of graphs.bin
  uint32_t tables_crc32_ = 0;
  uint64_t weights_bytes_ = 0;  // as stated in graphs.bin
  uint32_t weights_header_crc32_ = 0;
  std::string strings_;
  TargetRecord target_record_{};
  TargetFacts target_;
  ModelRecord model_{};
  std::vector<KernelRecord> kernels_;
  std::vector<WeightRecord> weights_;
  std::vector<GraphRecord> graphs_;
  std::vector<CommandRecord> commands_;
  std::vector<OperandRecord> operands_;
  std::vector<CodeRecord> code_;
  std::vector<AdapterRecord> adapters_;
  std::vector<CollectiveRecord> collectives_;
  std::vector<StageRecord> stages_;
  std::vector<KvLayerRecord> kv_layers_;  // empty: all layers are as the model record says
  std::vector<StateLayerRecord> state_layers_;  // ascending
  ModelShape shape_{};
  // Kept open: devices load the very files that were checked, even if the paths have been replaced since.
  std::vector<MappedFile> code_files_;
  MappedFile weight_file_;
  uint64_t weights_header_bytes_ = 0;  // including the length field before it
  uint64_t max_arena_bytes_ = 0;
};

// Follows the commands of a graph, in order, from stage to stage.
class StageWalk {
 public:
  StageWalk(const Artifact& artifact, const GraphRecord& graph) : artifact_(artifact), graph_(graph) {}
  // The stage of the next command.
  uint32_t at() const { return at_; }
  // Whether a rank of `stage` runs the next command. The stages on both sides run what is passed on.
  bool Runs(const CommandRecord& command, uint32_t stage) {
    const CollectiveRecord* collective = artifact_.collective(command);
    if (collective == nullptr || collective->op != static_cast<uint32_t>(CollectiveOp::kPassOn)) {
      end_ = 0;
      return stage == at_;
    }
    if (collective->stage != from_) end_ = 0;
    from_ = collective->stage;
    place_ = end_;
    const bool tokens = collective->rows == static_cast<uint32_t>(CollectiveRows::kTokens);
    const uint64_t rows = tokens ? graph_.max_tokens : graph_.max_samples;
    end_ = RoundUp(place_ + rows * collective->width * sizeof(float), kAlignment);
    at_ = (collective->stage + 1) % artifact_.num_stages();
    return stage == collective->stage || stage == at_;
  }
  // Behind Runs of a pass_on: where its rows lie among those that its stage passes on in this step, and where they end, in
  // bytes.
  uint64_t place() const { return place_; }
  uint64_t passed_end() const { return end_; }

 private:
  const Artifact& artifact_;
  const GraphRecord& graph_;
  uint32_t at_ = 0, from_ = 0;
  uint64_t place_ = 0, end_ = 0;
};

}  // namespace llmc

// The C handle: one more reference.
struct llmc_artifact {
  std::shared_ptr<const llmc::Artifact> artifact;
};
