// Location of a device's weights: the mapping of their file or, as far as moved, huge pages of this process. A core's
// TLB covers these far better. Layout and bytes are the same, and so are results.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"
#include "device/cpu/memory_nodes.h"
#include "device/cpu/team.h"

namespace llmc {

// In the order of the values of the option `weights`.
enum class WeightMode : uint32_t { kAuto = 0, kMapped = 1, kCopied = 2 };

struct WeightOptions {
  WeightMode mode = WeightMode::kAuto;
  // least bytes of weights for AUTO to move: fewer stay in the caches, or at least their page tables do
  uint64_t min_bytes = 64ull << 20;
  uint64_t part_bytes = 0;  // bytes moved at a time; 0: a sixteenth, which takes about a quarter of a step's time
};

class WeightMemory {
 public:
  WeightMemory() = default;
  // reserve: bytes that this process needs besides the copy. rank: the rank whose weights are read. Throws
  // std::bad_alloc.
  WeightMemory(std::shared_ptr<const Artifact> artifact, const WeightOptions& options, uint64_t reserve,
               uint32_t rank = 0);

  const Artifact& artifact() const { return *artifact_; }
  // First byte of a weight, by operand index; valid until the next Move.
  char* address(uint32_t index) const;
  // Whether nothing is left to move, or moving has been given up.
  bool settled() const { return settled_; }
  // Bytes of the rank's weights.
  uint64_t bytes() const { return BytesBelow(UINT64_MAX); }
  uint64_t moved_bytes() const { return BytesBelow(moved_); }
  // Spread bytes of the copy, see NodeSpread::Place.
  uint64_t spread_bytes() const { return spread_; }
  // Reads the next part of the file into huge pages, placed by `spread`, with all threads of the team. If memory is
  // short, the rest stays mapped for good. An error means that the file cannot be read. Nothing has changed then, and
  // the next call tries again.
  Status Move(Team* team, NodeSpread* spread);

 private:
  // Bytes of the file that this rank reads, from begin to end.
  struct Range {
    uint64_t begin, end;
  };
  // Bytes of the file below `end` that this rank reads.
  uint64_t BytesBelow(uint64_t end) const;

  std::shared_ptr<const Artifact> artifact_;
  uint32_t rank_ = 0;
  std::vector<Range> ranges_;  // ascending, none empty
  Pages pages_;
  uint64_t reserve_ = 0, part_bytes_ = 0;
  uint64_t moved_ = 0;  // file offset up to which the ranges are in pages_
  uint64_t spread_ = 0;
  uint64_t dropped_ = 0;  // bytes of the mapping that are no longer read
  bool settled_ = true;
};

}  // namespace llmc
