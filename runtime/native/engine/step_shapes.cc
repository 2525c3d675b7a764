#include "engine/step_shapes.h"

#include <algorithm>
#include <tuple>

namespace llmc {
namespace {

constexpr std::size_t kSlots = 2 * StepShapes::kMost;
static_assert((kSlots & (kSlots - 1)) == 0);

bool SameShape(const llmc_step_shape& a, const llmc_step_shape& b) {
  const auto key = [](const llmc_step_shape& s) {
    return std::tie(s.phase, s.graph, s.num_seqs, s.num_tokens, s.num_samples, s.num_blocks, s.all_blocks);
  };
  return key(a) == key(b);
}

std::size_t SlotOf(const llmc_step_shape& s) {
  uint64_t hash = 0;
  for (const uint32_t part : {s.phase, s.graph, s.num_seqs, s.num_tokens, s.num_samples, s.num_blocks, s.all_blocks}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return static_cast<std::size_t>(hash) & (kSlots - 1);
}

}  // namespace

void StepShapes::Count(const llmc_step_shape& shape, uint64_t replay_ns) noexcept {
  if (slots_.empty()) return;
  std::size_t slot = SlotOf(shape);
  while (slots_[slot] != kFree && !SameShape(shapes_[slots_[slot]], shape)) slot = (slot + 1) & (kSlots - 1);
  if (slots_[slot] == kFree) {
    if (shapes_.size() == kMost) {
      ++lost_;
      return;
    }
    slots_[slot] = static_cast<uint16_t>(shapes_.size());
    shapes_.push_back(shape);  // capacity is reserved
    shapes_.back().count = shapes_.back().replay_ns = 0;
    shapes_.back().replay_ns_squared = 0;
  }
  llmc_step_shape& found = shapes_[slots_[slot]];
  ++found.count;
  found.replay_ns += replay_ns;
  found.replay_ns_squared += static_cast<double>(replay_ns) * static_cast<double>(replay_ns);
}

void StepShapes::Take(std::vector<llmc_step_shape>* room, uint64_t* lost) {
  if (slots_.empty()) slots_.assign(kSlots, kFree);
  room->clear();
  shapes_.swap(*room);
  std::fill(slots_.begin(), slots_.end(), kFree);
  *lost = lost_;
  lost_ = 0;
}

}  // namespace llmc
