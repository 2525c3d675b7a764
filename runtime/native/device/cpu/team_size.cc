#include "device/cpu/team_size.h"

#include <algorithm>
#include <functional>

namespace llmc {

uint32_t BestTeamSize(const std::vector<double>& late) {
  const std::size_t n = late.size();
  std::size_t droppable = 0;
  while (droppable + 1 < n && late[droppable] > TeamSizePolicy::kLate) ++droppable;
  // The first pass finds the best speed, the second the fewest threads that are as good.
  double best = 0;
  for (const bool choose : {false, true}) {
    double together = 1;
    for (std::size_t dropped = n; dropped-- > 0;) {
      together *= 1 - late[dropped];
      const double speed = static_cast<double>(n - dropped) * together;
      if (dropped > droppable) continue;
      if (choose && speed >= TeamSizePolicy::kAsGood * best) return static_cast<uint32_t>(n - dropped);
      best = std::max(best, speed);
    }
  }
  return static_cast<uint32_t>(n);
}

TeamSizePolicy::TeamSizePolicy(uint32_t num_threads) : num_threads_(num_threads), size_(num_threads) {
  late_.reserve(num_threads);
}

void TeamSizePolicy::Look(uint64_t worked_ns, const uint64_t* late_ns) {
  if (worked_ns < next_look_ns()) return;
  const uint64_t elapsed_ns = worked_ns - since_ns_;
  since_ns_ = worked_ns;
  late_.clear();
  for (uint32_t i = 0; i < size_; ++i) {
    late_.push_back(static_cast<double>(std::min(late_ns[i], elapsed_ns)) / static_cast<double>(elapsed_ns));
  }
  std::sort(late_.begin(), late_.end(), std::greater<>());
  const uint32_t best = BestTeamSize(late_);
  const bool all = size_ == num_threads_;
  size_ = best;
  if (!all) return;
  if (best < num_threads_) {
    pause_ns_ = std::max(kPausePerLook * elapsed_ns, std::min(pause_ns_ * 2, kLongestPauseNs));
    changed_ns_ = worked_ns;
  } else if (worked_ns - changed_ns_ >= pause_ns_) {
    pause_ns_ = 0;
  }
}

void TeamSizePolicy::Recall(uint64_t worked_ns) {
  size_ = num_threads_;
  since_ns_ = changed_ns_ = worked_ns;
}

}  // namespace llmc
