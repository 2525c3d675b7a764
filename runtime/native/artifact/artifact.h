// Artifact: an opened, validated artifact directory (FORMAT.md) with its kernels loaded. Immutable and shared.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "artifact/model_shape.h"
#include "core/mapped_file.h"
#include "core/status.h"

namespace llmc {

constexpr uint32_t kMaxBuffers = 12;
constexpr uint32_t kMaxWeightParts = 2;
constexpr uint32_t kNumFamilies = 8;
constexpr uint32_t kNumInputs = 8;
constexpr uint64_t kAlignment = 64;

enum class OperandKind : uint32_t { kArena = 0, kWeight = 1, kInput = 2, kKeyPool = 3, kValuePool = 4, kOutput = 5 };
enum Input : uint32_t {
  kInputIds = 0,
  kPositions = 1,
  kSlotMapping = 2,
  kBlockTables = 3,
  kContextLens = 4,
  kQueryStart = 5,
  kSampleIndex = 6,
  kTokenSeq = 7
};

// Records of graphs.bin, byte for byte.
struct ModelRecord {
  int32_t num_layers, num_kv_heads, head_dim, head_dim_padded, block_size, kv_dtype, vocab_size, max_model_len;
  int32_t max_num_seqs, panel_columns, act_dtype, sliding_window, num_eos, eos[8], bos, pad[10];
};
struct KernelRecord {
  uint32_t symbol_offset, symbol_length, num_buffers, family, max_tasks, weight_parts;
};
struct WeightRecord {
  uint32_t name_offset, name_length, dtype, rank;
  uint64_t file_offset, bytes;
  int64_t shape[4];
  uint32_t crc32, reserved;
};
struct GraphRecord {
  uint32_t phase, batch, seq, max_tokens, max_seqs, max_samples, max_blocks_per_seq, row_tile, first_command;
  uint32_t num_commands;
  uint64_t arena_bytes, reserved[2];
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
static_assert(sizeof(ModelRecord) == 128 && sizeof(KernelRecord) == 24 && sizeof(WeightRecord) == 72 &&
                  sizeof(GraphRecord) == 64 && sizeof(CommandRecord) == 24 && sizeof(OperandRecord) == 24,
              "records have the sizes of FORMAT.md");

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bytes of input `index` of a graph that a kernel may touch.
uint64_t InputTouchedBytes(const GraphRecord& graph, uint32_t index);
// The same, rounded up to whole cache lines.
uint64_t InputBytes(const GraphRecord& graph, uint32_t index);

// What graphs.bin says of the files beside it.
struct FileSums {
  uint64_t code_bytes = 0, weights_bytes = 0;
  uint32_t code_crc32 = 0, weights_header_crc32 = 0;
};

class Artifact {
 public:
  Artifact() = default;
  Artifact(const Artifact&) = delete;
  Artifact& operator=(const Artifact&) = delete;
  ~Artifact();

  static Status Open(const std::string& directory, std::shared_ptr<const Artifact>* out);
  // Reads weights.safetensors from end to end and compares every tensor with its CRC-32; the rest must be zero.
  Status Verify() const;

  // Whether this artifact is `older` with graphs and kernels behind its own: the same model, weights, numbers.
  Status CheckExtends(const Artifact& older) const;

  const ModelRecord& model() const { return model_; }
  const ModelShape& shape() const { return shape_; }
  const std::vector<KernelRecord>& kernels() const { return kernels_; }
  const std::vector<WeightRecord>& weights() const { return weights_; }
  const std::vector<GraphRecord>& graphs() const { return graphs_; }
  const std::vector<CommandRecord>& commands() const { return commands_; }
  const std::vector<OperandRecord>& operands() const { return operands_; }
  void* function(uint32_t kernel) const { return functions_[kernel]; }
  const MappedFile& weight_file() const { return weight_file_; }

  uint32_t isa_level() const { return isa_level_; }
  uint64_t code_bytes() const { return files_.code_bytes; }
  uint64_t max_arena_bytes() const { return max_arena_bytes_; }
  // Bytes of one KV block of one layer.
  uint64_t key_block_bytes() const { return key_block_bytes_; }
  uint64_t value_block_bytes() const { return value_block_bytes_; }

 private:
  Status ReadTables(const MappedFile& file);
  Status CheckModel();
  Status CheckKernels();
  Status CheckWeights();
  Status CheckGraphs();
  Status CheckOperand(const GraphRecord& graph, uint64_t index) const;
  Status LoadKernels();
  Status Corrupt(const char* file, const std::string& what) const;
  std::string WeightName(const WeightRecord& weight) const;

  std::string directory_;
  uint32_t isa_level_ = 0;
  FileSums files_;
  std::string strings_;
  ModelRecord model_{};
  std::vector<KernelRecord> kernels_;
  std::vector<WeightRecord> weights_;
  std::vector<GraphRecord> graphs_;
  std::vector<CommandRecord> commands_;
  std::vector<OperandRecord> operands_;
  ModelShape shape_{};
  MappedFile weight_file_;
  uint64_t weights_header_bytes_ = 0;  // with the length before it
  uint64_t max_arena_bytes_ = 0, key_block_bytes_ = 0, value_block_bytes_ = 0;
  void* library_ = nullptr;
  std::vector<void*> functions_;
};

}  // namespace llmc

// The C handle: one more reference.
struct llmc_artifact {
  std::shared_ptr<const llmc::Artifact> artifact;
};
