// Channel: what rank 0 says to all others, a stream of bytes in the order in which it was said.
#pragma once
#include <cstdint>
#include <memory>

#include "collective/room.h"

namespace llmc {

// Of rank 0. One thread at a time.
class Speaker {
 public:
  explicit Speaker(std::shared_ptr<Room> room) : room_(std::move(room)) {}
  // Begins a new line. Waits where a rank lags far behind; an error once a rank has failed.
  Status Say(const void* data, uint64_t bytes);

 private:
  std::shared_ptr<Room> room_;
  uint32_t lines_ = 0;
};

// Of another rank. One thread at a time.
class Listener {
 public:
  explicit Listener(std::shared_ptr<Room> room) : room_(std::move(room)) {}
  // The next bytes, as many as were said at once. Spins for spin_ns before it sleeps.
  Status Hear(void* data, uint64_t bytes, uint64_t spin_ns);

 private:
  std::shared_ptr<Room> room_;
  uint32_t lines_ = 0;
};

}  // namespace llmc
