#include "engine/speculation/step_costs.h"

#include <algorithm>

namespace llmc {
namespace {

// Weight of what was just measured. What other programs take only ever adds to a time: the quiet ones count more.
constexpr double kFaster = 0.3, kSlower = 0.1;
// Before anything is known: a row adds this share of a step.
constexpr double kShareOfRow = 0.05;
// Behind what is known, so much more than there, and this much at least.
constexpr double kSteeper = 1.25, kLeastShare = 0.005;
// Steps after which a time is looked at anew: contexts grow, and other programs come and go.
constexpr uint64_t kPlainSteps = 128, kPointSteps = 512;
// A step that took far longer than usual says more about the machine than about its rows.
constexpr double kMostOfUsual = 2;

uint32_t BitWidth(uint32_t x) {
  uint32_t width = 0;
  while (width < 32 && x >> width != 0) ++width;
  return width;
}

void Mix(double value, bool known, double* mean) {
  const double weight = !known ? 1 : value < *mean ? kFaster : kSlower;
  *mean += weight * (value - *mean);
}

}  // namespace

uint32_t StepCosts::LoadOf(uint32_t seqs) {
  return seqs < kExactLoads ? seqs : std::min(kExactLoads + BitWidth(seqs) - 6, kLoads - 1);
}

// One by one up to 16, then by fours up to 48, then in doublings.
uint32_t StepCosts::PointOf(uint32_t extra) {
  if (extra <= 16) return extra - 1;
  if (extra <= 48) return 16 + (extra - 17) / 4;
  return std::min(24 + BitWidth(extra) - 6, kPoints - 1);
}

void StepCosts::Take(uint32_t seqs, uint64_t contexts, uint32_t extra, uint64_t ns) {
  Load& load = loads_[LoadOf(seqs)];
  const double took = static_cast<double>(ns);
  ++steps_;
  if (extra == 0) {
    const bool known = Known(seqs, contexts);
    Mix(known ? std::min(took, kMostOfUsual * load.plain_ns) : took, known, &load.plain_ns);
    load.contexts = contexts;
    load.step = steps_;
    return;
  }
  if (load.plain_ns <= 0) return;
  Point& point = load.points[PointOf(extra)];
  const bool known = Fresh(point.step, kPointSteps);
  const double usual = 1 + (known ? point.share : 1);
  Mix(std::clamp(took / load.plain_ns, 1.0, kMostOfUsual * usual) - 1, known, &point.share);
  point.rows = known ? point.rows + kSlower * (extra - point.rows) : extra;
  point.step = steps_;
}

bool StepCosts::Known(uint32_t seqs, uint64_t contexts) const {
  const Load& load = loads_[LoadOf(seqs)];
  const uint64_t about = load.contexts / 4 + 64 * uint64_t{seqs};
  return Fresh(load.step, kPlainSteps) && contexts <= load.contexts + about && contexts + about >= load.contexts;
}

bool StepCosts::Seen(const Load& load) const {
  return std::any_of(load.points.begin(), load.points.end(),
                     [this](const Point& point) { return Fresh(point.step, kPointSteps); });
}

// The load of which extra rows were seen and that has most nearly as many sequences; its own where there is none.
const StepCosts::Load& StepCosts::Nearest(uint32_t seqs) const {
  const uint32_t own = LoadOf(seqs);
  for (uint32_t distance = 0; distance < kLoads; ++distance) {
    if (own >= distance && Seen(loads_[own - distance])) return loads_[own - distance];
    if (own + distance < kLoads && Seen(loads_[own + distance])) return loads_[own + distance];
  }
  return loads_[own];
}

double StepCosts::Extra(uint32_t seqs, uint32_t extra) const {
  if (extra == 0) return 0;
  const double rows = extra;
  Point before;  // no row, no share
  const Load& load = Nearest(seqs);
  const double own = Plain(seqs), scale = own > 0 && load.plain_ns > 0 ? load.plain_ns / own : 1;
  for (const Point& point : load.points) {
    if (!Fresh(point.step, kPointSteps)) continue;
    if (point.rows >= rows) {
      const double slope = (point.share - before.share) / (point.rows - before.rows);
      return scale * std::max(point.share - slope * (point.rows - rows), 0.0);
    }
    before = point;
  }
  // Behind what was seen: somewhat steeper than there.
  const double slope = before.rows > 0 ? std::max(kSteeper * before.share / before.rows, kLeastShare) : kShareOfRow;
  return scale * (before.share + slope * (rows - before.rows));
}

uint32_t StepCosts::MostExtra(uint32_t seqs) const {
  double seen = 0;
  for (const Point& point : Nearest(seqs).points) {
    if (Fresh(point.step, kPointSteps)) seen = std::max(seen, point.rows);
  }
  return static_cast<uint32_t>(2 * seen) + 2;
}

}  // namespace llmc
