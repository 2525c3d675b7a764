// Where a device reads its weights: in the mapping of their file or, as far as they were moved, in huge pages of this
// process, which a core's TLB covers far better. Layout and bytes are the same, so results are.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"
#include "device/cpu/memory_nodes.h"
#include "device/cpu/team.h"

namespace llmc {

// In the order of the choices of the option `weights`.
enum class WeightMode : uint32_t { kAuto = 0, kMapped = 1, kCopied = 2 };

struct WeightOptions {
  WeightMode mode = WeightMode::kAuto;
  uint64_t min_bytes = 64ull << 20;  // of weights that AUTO moves: less stays in the caches, at least in their tables
  uint64_t part_bytes = 0;  // moved at a time; 0: a sixteenth, which takes about as long as a quarter of a step
};

class WeightMemory {
 public:
  WeightMemory() = default;
  // reserve: bytes that this process will take besides the copy. rank: whose weights are read. Throws std::bad_alloc.
  WeightMemory(std::shared_ptr<const Artifact> artifact, const WeightOptions& options, uint64_t reserve,
               uint32_t rank = 0);

  const Artifact& artifact() const { return *artifact_; }
  // First byte of a weight, as operands name it; valid until the next Move.
  char* address(uint32_t index) const;
  // Whether nothing is left to move, or nothing may be.
  bool settled() const { return settled_; }
  // Of the rank's weights.
  uint64_t bytes() const { return BytesBelow(end_); }
  uint64_t moved_bytes() const { return BytesBelow(moved_); }
  // Of the copy, see NodeSpread::Place.
  uint64_t spread_bytes() const { return spread_; }
  // Reads the next part of the file into huge pages, placed by `spread`, with all threads of the team. Where memory is
  // short the rest stays mapped for good. An error means that the file cannot be read: nothing has changed, and the next
  // call tries again.
  Status Move(Team* team, NodeSpread* spread);

 private:
  // Of the file, the bytes below `end` that this rank reads.
  uint64_t BytesBelow(uint64_t end) const { return end - (std::clamp(end, gap_, gap_end_) - gap_); }

  std::shared_ptr<const Artifact> artifact_;
  uint32_t rank_ = 0;
  uint64_t gap_ = 0, gap_end_ = 0;  // of the file, weights of the ranks before this one
  uint64_t end_ = 0;  // of this rank's weights; behind it are those of later ranks
  Pages pages_;
  uint64_t reserve_ = 0, part_bytes_ = 0;
  uint64_t moved_ = 0;  // the file up to here is in pages_, but for the gap
  uint64_t spread_ = 0;
  uint64_t dropped_ = 0;  // bytes of the mapping that nobody reads any more
  bool settled_ = true;
};

}  // namespace llmc
