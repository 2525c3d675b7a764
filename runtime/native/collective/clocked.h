// ClockedCollective: wraps another one and measures the time a rank spends in it, including the wait for other ranks.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "collective/collective.h"
#include "core/clock.h"

namespace llmc {

// Time in one operation. Thread 0 writes, any thread reads.
struct CollectiveTime {
  std::atomic<uint64_t> count{0}, ns{0};

  void Add(uint64_t more_ns) {
    ns.fetch_add(more_ns, std::memory_order_relaxed);
    count.fetch_add(1, std::memory_order_relaxed);
  }
  void Forget() {
    ns.store(0, std::memory_order_relaxed);
    count.store(0, std::memory_order_relaxed);
  }
};

class ClockedCollective final : public Collective {
 public:
  explicit ClockedCollective(std::shared_ptr<Collective> own) : own_(std::move(own)) {}

  uint32_t rank() const override { return own_->rank(); }
  uint32_t num_ranks() const override { return own_->num_ranks(); }
  uint32_t ranks_of_stage() const override { return own_->ranks_of_stage(); }
  void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) override {
    Timed(&reductions_, thread, [&] { own_->AllReduce(work, thread, num_threads); });
  }
  void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) override {
    Timed(&gatherings_, thread, [&] { own_->AllGather(work, thread, num_threads); });
  }
  void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) override {
    Timed(&passings_, thread, [&] { own_->PassOn(work, thread, num_threads); });
  }
  bool overlaps() const override { return own_->overlaps(); }
  void BeginReduce(const Reduction& work, uint32_t lane) override {
    Lane& one = lanes_[lane];
    const uint64_t start = MonotonicNs();
    own_->BeginReduce(work, lane);
    one.begun = MonotonicNs();
    one.spent = one.begun - start;
    one.ended = 0;
  }
  bool Reduced(uint32_t lane) const override { return own_->Reduced(lane); }
  void FinishReduce(uint32_t lane) override {
    Lane& one = lanes_[lane];
    const uint64_t start = MonotonicNs();
    hidden_ns_.fetch_add((one.ended != 0 ? one.ended : start) - one.begun, std::memory_order_relaxed);
    own_->FinishReduce(lane);
    reductions_.Add(one.spent + MonotonicNs() - start);
    one = {};
  }
  void Tend() override {
    own_->Tend();
    for (uint32_t lane = 0; lane < kNumLanes; ++lane) {
      Lane& one = lanes_[lane];
      if (one.begun != 0 && one.ended == 0 && own_->Reduced(lane)) one.ended = MonotonicNs();
    }
  }
  Status status() const override { return own_->status(); }

  const CollectiveTime& reductions() const { return reductions_; }
  const CollectiveTime& gatherings() const { return gatherings_; }
  const CollectiveTime& passings() const { return passings_; }
  // Time in which sums were on their way while the rank did something else. No part of reductions().
  uint64_t hidden_ns() const { return hidden_ns_.load(std::memory_order_relaxed); }
  // Counts anew, as if nothing had been measured. Only while nothing is on its way.
  void Forget() {
    for (CollectiveTime* time : {&reductions_, &gatherings_, &passings_}) time->Forget();
    hidden_ns_.store(0, std::memory_order_relaxed);
  }

 private:
  // A sum that was begun: when, when it was there, and the time of its beginning.
  struct Lane {
    uint64_t begun = 0, ended = 0, spent = 0;
  };

  template <typename Body>
  static void Timed(CollectiveTime* time, uint32_t thread, const Body& body) {
    if (thread != 0) return body();
    const uint64_t start = MonotonicNs();
    body();
    time->Add(MonotonicNs() - start);
  }

  std::shared_ptr<Collective> own_;
  CollectiveTime reductions_, gatherings_, passings_;
  std::array<Lane, kNumLanes> lanes_{};  // of thread 0
  std::atomic<uint64_t> hidden_ns_{0};
};

}  // namespace llmc
