#include "device/cpu/adapter_pools.h"

namespace llmc {

Status AdapterPools::Allocate(const Artifact& artifact, AdapterPools* out) {
  out->slots_ = artifact.shape().adapters;
  if (out->slots_.empty()) return Status::Ok();
  uint64_t bytes = 0;
  for (const AdapterSlot& slot : out->slots_) {
    out->offsets_.push_back(bytes);
    uint64_t of_pool = 0;
    if (__builtin_mul_overflow(slot.bytes(), uint64_t{artifact.shape().adapter_slots}, &of_pool) ||
        __builtin_add_overflow(bytes, of_pool, &bytes)) {
      bytes = UINT64_MAX;
      break;
    }
  }
  return Pages::Allocate(bytes, "slots of adapters", &out->pages_);
}

void AdapterPools::Load(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
  for (uint32_t linear = 0; linear < slots_.size(); ++linear) {
    PackAdapter(slots_[linear], linear, matrices, pool(linear) + slot * slots_[linear].bytes());
  }
}

}  // namespace llmc
