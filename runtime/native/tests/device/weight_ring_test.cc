// Where loads lie in the ring of streamed weights, and what each of them waits for: against a memory that is simulated
// byte by byte.
#include "device/gpu/weight_ring.h"

#include <algorithm>
#include <random>

#include "support/check.h"

using namespace llmc;

namespace {

struct Case {
  std::vector<HostWeight> weights;
  std::vector<RingUse> uses;
};

// Weights that lie beside each other on the host or apart, and commands that read one to three of them, some again.
Case Drawn(std::mt19937* random) {
  const auto draw = [&](uint64_t most) { return static_cast<uint64_t>((*random)()) % most; };
  Case drawn;
  uint64_t at = 0;
  const uint64_t most_bytes = draw(2) ? 100 : 3000;
  for (uint64_t i = 0, count = 1 + draw(30); i < count; ++i) {
    drawn.weights.push_back({at, draw(8) ? 1 + draw(most_bytes) : 0});
    at = RoundUp(at + drawn.weights.back().bytes, kAlignment) + (draw(3) ? 0 : kAlignment);
  }
  uint32_t command = 0;
  for (uint64_t i = 0, count = 1 + draw(40); i < count; ++i) {
    RingUse use;
    use.command = command += 1 + static_cast<uint32_t>(draw(3));
    for (uint64_t w = draw(drawn.weights.size()), end = w + 1 + draw(3); w < end && w < drawn.weights.size(); ++w) {
      if (drawn.weights[w].bytes > 0) use.weights.push_back(static_cast<uint32_t>(w));
    }
    if (!use.weights.empty()) drawn.uses.push_back(use);
    if (!use.weights.empty() && draw(4) == 0) drawn.uses.push_back({++command, {use.weights[0]}});
  }
  return drawn;
}

const RingLoad::Placed* Find(const RingLoad& load, uint32_t weight) {
  for (const RingLoad::Placed& one : load.weights) {
    if (one.weight == weight) return &one;
  }
  return nullptr;
}

// Which load each byte of the ring has, as if each one came as early as it may: in order, and behind `after`.
void CheckThatReadersFindTheirs(const Case& of, const std::vector<RingLoad>& loads, uint64_t ring_bytes) {
  constexpr uint32_t kNobody = UINT32_MAX;
  std::vector<uint32_t> holder(ring_bytes, kNobody);
  size_t loaded = 0, covered = 0;
  const auto load_behind = [&](int64_t command) {
    for (; loaded < loads.size(); ++loaded) {
      const RingLoad& load = loads[loaded];
      if (load.after != RingLoad::kNone && int64_t{load.after} > command) break;
      CHECK(load.at % kAlignment == 0 && load.at + load.bytes <= ring_bytes);
      for (const RingLoad::Copy& copy : load.copies) {
        CHECK(copy.to >= load.at && copy.to + copy.bytes <= load.at + load.bytes);
        std::fill_n(holder.begin() + static_cast<int64_t>(copy.to), copy.bytes, static_cast<uint32_t>(loaded));
      }
    }
  };
  load_behind(-1);
  for (const RingUse& use : of.uses) {
    const auto found = std::find_if(loads.begin(), loads.end(), [&](const RingLoad& load) {
      return load.first <= use.command && use.command <= load.last &&
             std::all_of(use.weights.begin(), use.weights.end(), [&](uint32_t weight) { return Find(load, weight); });
    });
    uint64_t bytes = 0;
    for (const uint32_t weight : use.weights) bytes = RoundUp(bytes, kAlignment) + of.weights[weight].bytes;
    CHECK((found == loads.end()) == (bytes > 0 && RoundUp(bytes, kAlignment) > ring_bytes));
    if (found != loads.end()) {
      ++covered;
      // It was there before its first reader, and nothing has overwritten it before its last one.
      CHECK(loaded > static_cast<size_t>(found - loads.begin()));
      for (const uint32_t weight : use.weights) {
        const RingLoad::Placed* placed = Find(*found, weight);
        const HostWeight& host = of.weights[weight];
        const auto begin = holder.begin() + static_cast<int64_t>(placed->at);
        const auto load = static_cast<uint32_t>(found - loads.begin());
        CHECK(std::all_of(begin, begin + static_cast<int64_t>(host.bytes), [&](uint32_t one) { return one == load; }));
        // Its bytes are those of the host.
        CHECK(std::any_of(found->copies.begin(), found->copies.end(), [&](const RingLoad::Copy& copy) {
          return copy.from <= host.at && host.at + host.bytes <= copy.from + copy.bytes &&
                 host.at - copy.from == placed->at - copy.to;
        }));
      }
    }
    load_behind(use.command);
  }
  CHECK(loaded == loads.size());
  CHECK(covered >= loads.size());
}

void ReadersFindTheirWeights() {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const Case of = Drawn(&random);
    const uint64_t ring = RoundUp(random() % 8000, kAlignment);
    CheckThatReadersFindTheirs(of, PlanRing(of.uses, of.weights, ring), ring);
  }
}

bool SameFirst(const RingLoad& a, const RingLoad& b) { return a.first == b.first; }

// In a ring of fitting size, every load begins beside the kernels that read the one before it.
void LoadsAreAhead() {
  std::mt19937 random(2);
  int checked = 0;
  for (int i = 0; i < 2000; ++i) {
    const Case of = Drawn(&random);
    const uint64_t ring = RingBytes(of.uses, of.weights, UINT64_MAX);
    const std::vector<RingLoad> loads = PlanRing(of.uses, of.weights, ring);
    CheckThatReadersFindTheirs(of, loads, ring);
    uint64_t most = 0;
    for (size_t l = 1; l < loads.size(); ++l) {
      CHECK(loads[l].after == RingLoad::kNone || loads[l].after < loads[l - 1].first);
      most = std::max(most, loads[l - 1].bytes + loads[l].bytes);
      ++checked;
    }
    CHECK(ring == (loads.size() == 1 ? loads[0].bytes : most));
    if (ring == 0) continue;
    // No ring is smaller: then one of them waits for the one before it, or has no room at all.
    const std::vector<RingLoad> tight = PlanRing(of.uses, of.weights, ring - kAlignment);
    bool late = tight.size() < loads.size() || !std::equal(loads.begin(), loads.end(), tight.begin(), SameFirst);
    for (size_t l = 1; l < tight.size(); ++l) {
      late = late || (tight[l].after != RingLoad::kNone && tight[l].after >= tight[l - 1].first);
    }
    CHECK(late);
  }
  CHECK(checked > 1000);
}

void NeighboursAreOneCopy() {
  const std::vector<HostWeight> weights = {{0, 100}, {128, 64}, {192, 10}, {512, 10}, {1024, 9}};
  const std::vector<RingLoad> loads = PlanRing({{3, {0, 1, 2, 3}}, {5, {1}}, {9, {4}}, {11, {1}}}, weights, 4096);
  CHECK(loads.size() == 3);
  CHECK(loads[0].first == 3 && loads[0].last == 5 && loads[0].copies.size() == 2);
  CHECK(loads[0].copies[0].bytes == 202 && loads[0].copies[1].from == 512 && loads[0].copies[1].bytes == 10);
  // What was held long ago is loaded again.
  CHECK(loads[2].weights[0].weight == 1);
}

void LargeLoadsAreReadInPlace() {
  const std::vector<HostWeight> weights = {{0, 64}, {64, 640}, {704, 128}};
  const std::vector<RingUse> uses = {{0, {0}}, {1, {1}}, {2, {2}}};
  CHECK(RingBytes(uses, weights, 1280) == 768);
  CHECK(RingBytes(uses, weights, 1279) == 192);
  CHECK(RingBytes(uses, weights, 127) == 0);
  CHECK(PlanRing(uses, weights, 192).size() == 2);
  CHECK(PlanRing(uses, weights, 0).empty());
}

}  // namespace

int main() {
  ReadersFindTheirWeights();
  LoadsAreAhead();
  NeighboursAreOneCopy();
  LargeLoadsAreReadInPlace();
  return llmc_test::Finish("weight_ring_test");
}
