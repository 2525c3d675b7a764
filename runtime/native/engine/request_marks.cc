#include "engine/request_marks.h"

namespace llmc {

void RequestMarks::Add(const llmc_request_mark& mark) noexcept {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (marks_.size() == kMost) {
    on_.store(false, std::memory_order_relaxed);
  } else {
    marks_.push_back(mark);  // capacity is reserved
  }
}

void RequestMarks::Take(std::vector<llmc_request_mark>* room, bool* complete) {
  room->clear();
  std::lock_guard<std::mutex> lock(mutex_);
  *complete = on();
  marks_.swap(*room);
  on_.store(true, std::memory_order_relaxed);
}

}  // namespace llmc
