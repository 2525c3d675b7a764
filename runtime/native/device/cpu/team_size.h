// Number of working threads in a team. It is reduced while other programs keep some threads off their CPUs, since all
// wait for the last one at every barrier. All threads work again on trial, after a pause that doubles with each failed
// trial.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

// Decides from clocks alone. worked_ns: time that the team has run jobs; time between jobs does not count.
class TeamSizePolicy {
 public:
  static constexpr uint64_t kLookNs = 20'000'000;  // shortest time that is judged
  // A pause is at least this multiple of the time judged before it, which may have been one long job.
  static constexpr uint64_t kPausePerLook = 20;
  static constexpr uint64_t kLongestPauseNs = 6'400'000'000;
  // A thread that is late for less than this share of the time stays: others take over much of its work.
  static constexpr double kLate = 0.15;
  // A smaller team that comes this near counts as equally good: it leaves a CPU to other programs.
  static constexpr double kAsGood = 0.9;

  explicit TeamSizePolicy(uint32_t num_threads);

  // Threads that should work from now on.
  uint32_t size() const { return size_; }
  // Time from which a call of Look is worthwhile. A single thread waits for nobody.
  uint64_t next_look_ns() const { return size_ > 1 ? since_ns_ + kLookNs : UINT64_MAX; }
  // late_ns: for each of `size` threads, its time runnable without running since the last look or recall.
  void Look(uint64_t worked_ns, const uint64_t* late_ns);
  // Whether to recall the threads that were left out.
  bool pause_over(uint64_t worked_ns) const { return size_ < num_threads_ && worked_ns - changed_ns_ >= pause_ns_; }
  // All threads work again.
  void Recall(uint64_t worked_ns);

 private:
  uint32_t num_threads_, size_;
  uint64_t since_ns_ = 0;  // of the last look or recall
  uint64_t changed_ns_ = 0;  // when the team was last reduced or recalled
  uint64_t pause_ns_ = 0;  // after the last reduction; 0: long past
  std::vector<double> late_;
};

// The most productive number of threads if each is missing for its share of the time, independently, and work stops
// unless all are present. late: these shares, largest first; the latest threads are dropped first.
uint32_t BestTeamSize(const std::vector<double>& late);

}  // namespace llmc
