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
    const uint64_t wanted = std::min(kStatesOfSeq * seqs_, most);
    const uint64_t by_rule = std::min({share > 0 ? share - 1 : 0, wanted, MostBesideLongest(wanted)});
    *out = options_.num_states != 0 ? options_.num_states : std::max<uint64_t>(by_rule, 1);
    if (*out <= most) return Status::Ok();
    return Refused("num_states is " + std::to_string(*out) + "; use at most " + std::to_string(most) + ".");
  }

  // As many states as leave room for a sequence of the longest length, in a pool that is not smaller than one that has
  // this room by half of its bytes. Else a larger pool, which has one state more, could hold shorter sequences only.
  uint64_t MostBesideLongest(uint64_t wanted) const {
    const uint64_t blocks = BlocksOfSeq() + 1;
    if (block_bytes_ != 0 && blocks > bytes_ / block_bytes_) return wanted;
    const uint64_t longest = blocks * block_bytes_, room = (bytes_ - longest) / model_.state_bytes;
    // In the smallest such pool, which has these bytes and a dummy's besides.
    const uint64_t fewest = std::min(std::max<uint64_t>(longest / model_.state_bytes, 3) - 2, wanted);
    return room > fewest ? room - 1 : wanted;
  }

  // Each pool has one entry more, its dummy.
  Status Blocks(uint64_t states, uint64_t* out) const {
    const uint64_t taken = model_.recurrent() ? (states + 1) * model_.state_bytes : 0;
    // Places of tokens, and the elements of a layer's pool, are counted in int32.
    const uint64_t most =
        std::max<uint64_t>(std::min(kMostIndex / AtLeastOne(model_.block_size), model_.max_kv_blocks), 1) - 1;
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
      const uint64_t of_seqs = seqs_ * BlocksOfSeq();
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
    const uint64_t given = std::max<uint64_t>(options_.num_states, 1);
    const std::string taken = ", the states of " + (given > 1 ? std::to_string(given) + " sequences" : "a sequence") +
                              " take " + std::to_string(given * model_.state_bytes) + " bytes,";
    return Refused("kv_bytes is " + std::to_string(bytes_) + " but one KV block takes " + std::to_string(block_bytes_) +
                   " bytes" + (model_.recurrent() ? taken : "") + " and one more " +
                   (model_.recurrent() ? "of each is a dummy" : "is the dummy block") + "; use at least " +
                   std::to_string(least) + (given > 1 ? ", or a smaller num_states." : "."));
  }

  uint64_t BlocksOfSeq() const {
    const uint64_t block_size = AtLeastOne(model_.block_size);
    return (AtLeastOne(model_.max_model_len) + block_size - 1) / block_size;
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
