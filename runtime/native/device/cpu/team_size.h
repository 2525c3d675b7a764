// How many threads of a team work: fewer while other programs keep some of them from their CPUs, since all wait for the
// last one at every barrier. All work again on trial, after a pause that doubles with each vain trial.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

// The decision, from clocks alone. worked_ns: how long the team has run jobs; what lies between jobs does not count.
class TeamSizePolicy {
 public:
  static constexpr uint64_t kLookNs = 20'000'000;  // the shortest time that is judged
  // A pause is at least this many times as long as what was judged before it, which may have been one long job.
  static constexpr uint64_t kPausePerLook = 20;
  static constexpr uint64_t kLongestPauseNs = 6'400'000'000;
  // A thread that is late for less than this part of the time stays: others take over much of its work.
  static constexpr double kLate = 0.15;
  // Fewer threads that come this near are as good: they leave a CPU to who wants it.
  static constexpr double kAsGood = 0.9;

  explicit TeamSizePolicy(uint32_t num_threads);

  // Threads that should work from now on.
  uint32_t size() const { return size_; }
  // When Look is worth a call. A thread alone waits for nobody.
  uint64_t next_look_ns() const { return size_ > 1 ? since_ns_ + kLookNs : UINT64_MAX; }
  // late_ns: of `size` threads, how long each was runnable without running since the last look or recall.
  void Look(uint64_t worked_ns, const uint64_t* late_ns);
  // Whether it is time to recall those that were left out.
  bool pause_over(uint64_t worked_ns) const { return size_ < num_threads_ && worked_ns - changed_ns_ >= pause_ns_; }
  // All threads work again.
  void Recall(uint64_t worked_ns);

 private:
  uint32_t num_threads_, size_;
  uint64_t since_ns_ = 0;  // of the last look or recall
  uint64_t changed_ns_ = 0;  // when fewer began to work, or all
  uint64_t pause_ns_ = 0;  // of the last change to fewer; 0: long past
  std::vector<double> late_;
};

// The number of threads that gets most done, if each is missing for its part of the time, independently of the others,
// and nothing goes on without all. late: those parts, the largest first; the latest threads are dropped first.
uint32_t BestTeamSize(const std::vector<double>& late);

}  // namespace llmc
