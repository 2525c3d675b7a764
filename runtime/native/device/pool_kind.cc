#include "device/pool_kind.h"

#include <algorithm>
#include <string>

namespace llmc {
namespace {

Status CheckCount(const char* what, uint32_t count, uint64_t most) {
  if (count >= 2 && count <= most) return Status::Ok();
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string(what) + " is " + std::to_string(count) +
                                                      ", outside 2 … " + std::to_string(most) +
                                                      "; choose another pool size");
}

std::string HasOnly(PoolKind kind, uint32_t count) {
  return "; the pool has " + std::to_string(count) + TextOf(kind, " blocks", " slots");
}

}  // namespace

PoolKind PoolKindOf(const Artifact& artifact, uint32_t layer) {
  return artifact.has_state(layer) ? PoolKind::kStates : PoolKind::kBlocks;
}

Status CheckPoolCounts(const Artifact& artifact, const PoolCounts& counts) {
  const ModelShape& model = artifact.shape();
  // The places of tokens, and the elements of a layer's pool, are counted in int32. Block 0 and slot 0 are dummies.
  const auto places = static_cast<uint64_t>(INT32_MAX / model.block_size);
  LLMC_RETURN_IF_ERROR(
      CheckCount("num_blocks with the dummy block", counts.blocks, std::min(places, model.max_kv_blocks)));
  if (model.recurrent()) return CheckCount("num_states with the dummy slot", counts.states, model.max_states);
  if (counts.states == 0) return Status::Ok();
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "num_states is " + std::to_string(counts.states) +
                                                      " and no layer of this model has a state; leave it out");
}

Status CheckEntry(PoolKind kind, uint32_t entry, uint32_t count) {
  if (entry < count) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, std::string(TextOf(kind, "KV block ", "slot of states ")) +
                                                  std::to_string(entry) + " does not exist" + HasOnly(kind, count));
}

Status CheckCopy(PoolKind kind, uint32_t from, uint32_t to, uint32_t count) {
  if (from < count && to < count) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE,
                       std::string(TextOf(kind, "cannot copy KV block ", "cannot copy states of slot ")) +
                           std::to_string(from) + " to " + std::to_string(to) + HasOnly(kind, count));
}

}  // namespace llmc
