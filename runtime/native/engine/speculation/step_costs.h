// StepCosts: what decode steps take, as measured while serving, and what more rows add to them.
#pragma once
#include <array>
#include <cstdint>

namespace llmc {

class StepCosts {
 public:
  // A decode step of so many sequences took `ns`; contexts: tokens that they have in the cache, all together; extra: rows
  // beside one for each sequence.
  void Take(uint32_t seqs, uint64_t contexts, uint32_t extra, uint64_t ns);
  // Whether a step without extra rows is known for such a load, and was seen not long ago.
  bool Known(uint32_t seqs, uint64_t contexts) const;
  // Nanoseconds of it.
  double Plain(uint32_t seqs) const { return loads_[LoadOf(seqs)].plain_ns; }
  // What extra rows add, as a share of a step without any. Between rows that were seen on a line; a guess where none were.
  // For a load of which none were seen, by those of the nearest one.
  double Extra(uint32_t seqs, uint32_t extra) const;
  // Extra rows that may be tried: not many more than were seen, for what they take is not known.
  uint32_t MostExtra(uint32_t seqs) const;

 private:
  struct Point {
    double rows = 0, share = 0;
    uint64_t step = 0;  // when it was seen last; 0: never
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
