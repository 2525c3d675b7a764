#include "device/cpu/queued_time.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

namespace llmc {

QueuedTime::QueuedTime() : file_(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}

QueuedTime::~QueuedTime() {
  if (file_ >= 0) ::close(file_);
}

// The second number of schedstat: ns that the thread waited for a CPU.
uint64_t QueuedTime::Ns() const {
  char text[80];
  const ssize_t length = file_ < 0 ? -1 : ::pread(file_, text, sizeof(text) - 1, 0);
  if (length <= 0) return 0;
  text[length] = '\0';
  char* rest = text;
  std::strtoull(rest, &rest, 10);
  return std::strtoull(rest, nullptr, 10);
}

}  // namespace llmc
