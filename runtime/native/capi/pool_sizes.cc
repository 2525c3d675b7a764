#include "capi/pool_sizes.h"

#include <algorithm>
#include <string>
#include <utility>

namespace llmc {
namespace {

constexpr uint64_t kDefaultBytes = 1ull << 30;
constexpr uint64_t kMostIndex = 0x7ffffffe;
constexpr uint64_t kStatesOfSeq = 3;  // its own, and two that are kept
// Blocks of a model whose layers all have states take no memory of the device, but of the engine's lists.
constexpr uint64_t kMostEmptyBlocks = 1u << 20;

Status Refused(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

uint64_t AtLeastOne(int32_t value) { return static_cast<uint64_t>(std::max(value, 1)); }

// Options and a model, with what 0 stands for.
class Rule {
 public:
  Rule(const ModelShape& model, const PoolOptions& options)
      : model_(model),
        options_(options),
        bytes_(options.kv_bytes != 0 ? options.kv_bytes : kDefaultBytes),
        block_bytes_(model.recurrent() ? model.kv_block_bytes : std::max<uint64_t>(model.kv_block_bytes, 1)),
        seqs_(options.max_num_seqs != 0 ? options.max_num_seqs : AtLeastOne(model.max_num_seqs)) {}

  Status Apply(PoolCounts* out) const {
    uint64_t states = 0, blocks = 0;
    if (model_.recurrent()) LLMC_RETURN_IF_ERROR(States(&states));
    if (options_.num_states != 0 && !model_.recurrent()) {
      return Refused("num_states is " + std::to_string(options_.num_states) +
                     " but no layer of this model has a state; leave it out.");
    }
    LLMC_RETURN_IF_ERROR(Blocks(states, &blocks));
    *out = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(states)};
    return Status::Ok();
  }

 private:
  // Half of the bytes at most, and not those of a block and a dummy; but one at least.
  Status States(uint64_t* out) const {
    const uint64_t most = std::max<uint64_t>(model_.max_states, 1) - 1, blocks = 2 * block_bytes_;
    const uint64_t share = std::min(bytes_ / 2, bytes_ > blocks ? bytes_ - blocks : 0) / model_.state_bytes;
    const uint64_t by_rule = std::min({share > 0 ? share - 1 : 0, kStatesOfSeq * seqs_, most});
    *out = options_.num_states != 0 ? options_.num_states : std::max<uint64_t>(by_rule, 1);
    if (*out <= most) return Status::Ok();
    return Refused("num_states is " + std::to_string(*out) + "; use at most " + std::to_string(most) + ".");
  }

  // Each pool has one entry more, its dummy.
  Status Blocks(uint64_t states, uint64_t* out) const {
    const uint64_t block_size = AtLeastOne(model_.block_size);
    const uint64_t taken = model_.recurrent() ? (states + 1) * model_.state_bytes : 0;
    // Places of tokens, and the elements of a layer's pool, are counted in int32.
    const uint64_t most = std::max<uint64_t>(std::min(kMostIndex / block_size, model_.max_kv_blocks), 1) - 1;
    const bool by_bytes = options_.num_blocks == 0 && options_.kv_bytes != 0;
    if (by_bytes && bytes_ < taken + 2 * block_bytes_) return TooFew(taken + 2 * block_bytes_);
    const uint64_t left = bytes_ > taken ? bytes_ - taken : 0;
    if (options_.num_blocks != 0) {
      *out = options_.num_blocks;
    } else if (by_bytes && block_bytes_ != 0) {
      *out = left / block_bytes_ - 1;
      // Bytes that neither pool can use stay free: how many these are depends on both.
      if (model_.recurrent()) *out = std::min(*out, most);
    } else {
      const uint64_t of_seqs = seqs_ * ((AtLeastOne(model_.max_model_len) + block_size - 1) / block_size);
      *out = std::max<uint64_t>(std::min(of_seqs, block_bytes_ != 0 ? left / block_bytes_ : kMostEmptyBlocks), 1);
    }
    if (*out <= most) return Status::Ok();
    if (by_bytes && !model_.recurrent()) {
      return Refused("kv_bytes is " + std::to_string(bytes_) + "; use at most " +
                     std::to_string((most + 1) * block_bytes_) + ".");
    }
    return Refused("num_blocks is " + std::to_string(*out) + "; use at most " + std::to_string(most) + ".");
  }

  Status TooFew(uint64_t least) const {
    const std::string states = ", the states of a sequence take " + std::to_string(model_.state_bytes) + " bytes,";
    return Refused("kv_bytes is " + std::to_string(bytes_) + " but one KV block takes " + std::to_string(block_bytes_) +
                   " bytes" + (model_.recurrent() ? states : "") + " and one more " +
                   (model_.recurrent() ? "of each is a dummy" : "is the dummy block") + "; use at least " +
                   std::to_string(least) + ".");
  }

  const ModelShape& model_;
  const PoolOptions& options_;
  uint64_t bytes_, block_bytes_, seqs_;
};

}  // namespace

Status PoolSizes(const ModelShape& model, const PoolOptions& options, PoolCounts* out) {
  return Rule(model, options).Apply(out);
}

PoolCounts WithDummies(const ModelShape& model, const PoolCounts& counts) {
  return {counts.blocks + 1, model.recurrent() ? counts.states + 1 : 0};
}

}  // namespace llmc
