// StepCosts: duration of decode steps, measured while serving, and the added cost of extra rows.
#pragma once
#include <array>
#include <cstdint>

namespace llmc {

class StepCosts {
 public:
  // A decode step of `seqs` sequences took `ns`. contexts: sum of their tokens in the cache. extra: rows beyond one per
  // sequence.
  void Take(uint32_t seqs, uint64_t contexts, uint32_t extra, uint64_t ns);
  // Whether a step without extra rows was measured for such a load, and recently.
  bool Known(uint32_t seqs, uint64_t contexts) const;
  // Its duration in nanoseconds.
  double Plain(uint32_t seqs) const { return loads_[LoadOf(seqs)].plain_ns; }
  // Added cost of extra rows, as a share of a step without any. Interpolated linearly between measured row counts; a
  // guess if none were measured. For a load without measurements, from the nearest load.
  double Extra(uint32_t seqs, uint32_t extra) const;
  // Extra rows that may be tried: few more than were measured, because the cost of more is unknown.
  uint32_t MostExtra(uint32_t seqs) const;

 private:
  struct Point {
    double rows = 0, share = 0;
    uint64_t step = 0;  // step of the last measurement; 0: none
  };
  static constexpr uint32_t kPoints = 32;
  struct Load {
    double plain_ns = 0;
    uint64_t contexts = 0, step = 0;
    std::array<Point, kPoints> points{};  // ascending
  };
  static constexpr uint32_t kExactLoads = 32, kLoads = kExactLoads + 28;

  static uint32_t LoadOf(uint32_t seqs);
  static uint32_t PointOf(uint32_t extra);
  bool Seen(const Load& load) const;
  const Load& Nearest(uint32_t seqs) const;
  bool Fresh(uint64_t step, uint64_t steps) const { return step != 0 && steps_ - step < steps; }

  std::array<Load, kLoads> loads_{};
  uint64_t steps_ = 0;
};

}  // namespace llmc
