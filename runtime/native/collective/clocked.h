// ClockedCollective: wraps another one and measures the time a rank spends in it, including the wait for other ranks.
#pragma once
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
  void Tend() override { own_->Tend(); }
  Status status() const override { return own_->status(); }

  const CollectiveTime& reductions() const { return reductions_; }
  const CollectiveTime& gatherings() const { return gatherings_; }
  const CollectiveTime& passings() const { return passings_; }

 private:
  template <typename Body>
  static void Timed(CollectiveTime* time, uint32_t thread, const Body& body) {
    if (thread != 0) return body();
    const uint64_t start = MonotonicNs();
    body();
    time->ns.fetch_add(MonotonicNs() - start, std::memory_order_relaxed);
    time->count.fetch_add(1, std::memory_order_relaxed);
  }

  std::shared_ptr<Collective> own_;
  CollectiveTime reductions_, gatherings_, passings_;
};

}  // namespace llmc
