// AdapterPools: the LoRA slots of every linear layer with a pool.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"
#include "device/adapters.h"

namespace llmc {

class AdapterPools {
 public:
  AdapterPools() = default;
  // Allocates nothing for an artifact without pools. Slots use memory only once they are filled.
  static Status Allocate(const Artifact& artifact, AdapterPools* out);

  const Pages& pages() const { return pages_; }
  // Slot 0 of a layer's pool.
  char* pool(uint32_t linear) const { return pages_.data() + offsets_[linear]; }
  // Fills a slot of every pool; layers that the adapter does not change get an empty slot. From any thread, while no
  // step uses the slot.
  void Load(uint32_t slot, const std::vector<AdapterMatrix>& matrices);

 private:
  std::vector<AdapterSlot> slots_;  // of each layer
  std::vector<uint64_t> offsets_;
  Pages pages_;
};

}  // namespace llmc
