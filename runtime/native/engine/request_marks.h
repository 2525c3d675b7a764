// RequestMarks: what became of requests step by step, in a list of fixed size. Notes nothing until it is asked, nor once
// the list is full: whoever looks takes it now and then, and nobody else pays.
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "llmc/llmc.h"

namespace llmc {

class RequestMarks {
 public:
  static constexpr std::size_t kMost = LLMC_MAX_REQUEST_MARKS;

  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  // From the stepping thread.
  void Add(const llmc_request_mark& mark) noexcept;
  // What was noted since the last call, oldest first, and whether it was all; notes from now on. `room` has capacity for
  // kMost. From any thread.
  void Take(std::vector<llmc_request_mark>* room, bool* complete);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<llmc_request_mark> marks_;  // has capacity for kMost once on
};

}  // namespace llmc
