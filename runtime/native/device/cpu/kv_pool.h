// KvPool: keys and values of all layers of a stage; each layer's keys precede its values, block by block. Of a layer
// with a state, one slot follows the other in the same way.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"
#include "device/pool_kind.h"

namespace llmc {

class KvPool {
 public:
  KvPool() = default;
  // stage: whose layers the pool is for. A failure leaves *out as it was.
  static Status Allocate(const Artifact& artifact, uint32_t stage, const PoolCounts& counts, KvPool* out);

  const PoolCounts& counts() const { return counts_; }
  const Pages& pages() const { return pages_; }
  // Block 0 of a layer of the stage, or slot 0.
  char* keys(uint32_t layer) const { return pages_.data() + parts_[2 * (layer - first_layer_)].at; }
  char* values(uint32_t layer) const { return pages_.data() + parts_[2 * (layer - first_layer_) + 1].at; }

  // Allocates the pages of the first entries of every layer of that kind; their contents stay.
  void Touch(PoolKind kind, uint64_t count);
  // Copies an entry of every layer of that kind: each of these parts by itself, so that threads may share the work.
  uint32_t num_parts(PoolKind kind) const { return static_cast<uint32_t>(parts_of(kind).size()); }
  void CopyPart(PoolKind kind, uint32_t part, uint32_t from, uint32_t to);
  // Copy an entry of every layer of that kind out and in: layer after layer, K before V.
  Status Read(PoolKind kind, uint32_t entry, unsigned char* out) const;
  Status Write(PoolKind kind, uint32_t entry, const unsigned char* from);

 private:
  // Keys or values of a layer, in bytes. at: where entry 0 begins.
  struct Part {
    uint64_t at, entry_bytes;
    uint64_t Entry(uint64_t entry) const { return at + entry * entry_bytes; }
  };

  const std::vector<Part>& parts_of(PoolKind kind) const { return kind_parts_[static_cast<uint32_t>(kind)]; }

  Pages pages_;
  PoolCounts counts_;
  uint32_t first_layer_ = 0;
  std::vector<Part> parts_;  // layer after layer, K before V
  std::vector<Part> kind_parts_[2];  // the same of each kind, without empty ones
  OfKinds<uint64_t> touched_;
};

}  // namespace llmc
