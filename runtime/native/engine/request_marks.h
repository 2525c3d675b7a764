// RequestMarks: actions of steps on requests, in a list of fixed size. It records nothing until first read, nor once
// the list is full. So a reader takes it regularly, and without a reader it costs nothing.
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
  // Called by the stepping thread.
  void Add(const llmc_request_mark& mark) noexcept;
  // Marks since the last call, oldest first, and whether none is missing; starts recording. `room` has capacity for
  // kMost. From any thread.
  void Take(std::vector<llmc_request_mark>* room, bool* complete);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<llmc_request_mark> marks_;  // has capacity for kMost once on
};

}  // namespace llmc
