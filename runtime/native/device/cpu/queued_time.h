// How long a thread was runnable without running: what other programs took from it. Linux counts it exactly.
#pragma once
#include <cstdint>

namespace llmc {

// Of the thread that constructs it.
class QueuedTime {
 public:
  QueuedTime();
  ~QueuedTime();
  QueuedTime(const QueuedTime&) = delete;
  QueuedTime& operator=(const QueuedTime&) = delete;

  // False where the kernel does not tell; Ns is then 0 for ever.
  bool known() const { return file_ >= 0; }
  // Since the thread began. Takes no memory.
  uint64_t Ns() const;

 private:
  int file_;  // /proc/thread-self/schedstat
};

}  // namespace llmc
