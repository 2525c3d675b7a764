// Time that a thread was runnable without running, which other programs took from it. Linux counts it exactly.
#pragma once
#include <cstdint>

namespace llmc {

// Of the constructing thread.
class QueuedTime {
 public:
  QueuedTime();
  ~QueuedTime();
  QueuedTime(const QueuedTime&) = delete;
  QueuedTime& operator=(const QueuedTime&) = delete;

  // False if the kernel does not report it; Ns is then always 0.
  bool known() const { return file_ >= 0; }
  // Since the thread started. Allocates nothing.
  uint64_t Ns() const;

 private:
  int file_;  // /proc/thread-self/schedstat
};

}  // namespace llmc
