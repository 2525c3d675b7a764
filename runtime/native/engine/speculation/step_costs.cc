#include "engine/speculation/step_costs.h"

#include <algorithm>

namespace llmc {
namespace {

// Weights of a new time. Low times weigh more: other programs only add to them.
constexpr double kFaster = 0.3, kSlower = 0.1;
// Before anything is measured: cost of a row as a share of a step.
constexpr double kShareOfRow = 0.05;
// Beyond measured rows: slope relative to the one before, and its least value.
constexpr double kSteeper = 1.25, kLeastShare = 0.005;
// Steps after which a time is measured again: contexts grow, and other programs come and go.
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

// Points are 1 row apart up to 16, then 4 up to 48, then they double.
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

// The load with the nearest number of sequences for which extra rows were measured; else the load of seqs.
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
  Point before;  // zero rows, zero share
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
  // Beyond measured rows: somewhat steeper than before.
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
