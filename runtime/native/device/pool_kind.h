// PoolKind: the two kinds of entries of pools. Layers with keys and values have KV blocks, layers with a state have
// slots.
#pragma once
#include <cstddef>
#include <cstdint>

#include "artifact/artifact.h"
#include "core/status.h"

namespace llmc {

enum class PoolKind : uint32_t { kBlocks = 0, kStates = 1 };
constexpr PoolKind kPoolKinds[] = {PoolKind::kBlocks, PoolKind::kStates};

// Something for each kind.
template <class T>
struct OfKinds {
  T blocks{}, states{};

  const T& operator[](PoolKind kind) const { return kind == PoolKind::kBlocks ? blocks : states; }
  T& operator[](PoolKind kind) { return kind == PoolKind::kBlocks ? blocks : states; }
};
// Entries of the pools, with the dummies.
using PoolCounts = OfKinds<uint32_t>;

// One of two texts, for errors.
inline const char* TextOf(PoolKind kind, const char* of_block, const char* of_state) {
  return kind == PoolKind::kBlocks ? of_block : of_state;
}

// What a layer's pools have.
PoolKind PoolKindOf(const Artifact& artifact, uint32_t layer);
// Checks that kernels can address so many entries.
Status CheckPoolCounts(const Artifact& artifact, const PoolCounts& counts);
// Check entries of a pool of `count`.
Status CheckEntry(PoolKind kind, uint32_t entry, uint32_t count);
Status CheckCopy(PoolKind kind, uint32_t from, uint32_t to, uint32_t count);

}  // namespace llmc
