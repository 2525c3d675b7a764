// Channel: a byte stream from rank 0 to all other ranks, in order.
#pragma once
#include <cstdint>
#include <memory>

#include "collective/room.h"

namespace llmc {

// Writing end, on rank 0. One thread at a time.
class Speaker {
 public:
  explicit Speaker(std::shared_ptr<Room> room) : room_(std::move(room)) {}
  // Begins a new line. Waits if a rank lags far behind; an error once a rank has failed.
  Status Say(const void* data, uint64_t bytes);

 private:
  std::shared_ptr<Room> room_;
  uint32_t lines_ = 0;
};

// Reading end, on another rank. One thread at a time.
class Listener {
 public:
  explicit Listener(std::shared_ptr<Room> room) : room_(std::move(room)) {}
  // Reads the next bytes, exactly as many as one Say wrote. Spins for spin_ns before it sleeps.
  Status Hear(void* data, uint64_t bytes, uint64_t spin_ns);

 private:
  std::shared_ptr<Room> room_;
  uint32_t lines_ = 0;
};

}  // namespace llmc
