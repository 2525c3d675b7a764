// Room: memory shared by the ranks of one host. Rank 0 creates it, the others join. Waiting ranks detect a rank that
// ends without leaving.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "collective/group.h"
#include "collective/shared_flag.h"
#include "core/status.h"

namespace llmc {

// of a rank's part of a message; longer messages are sent in pieces of this size
constexpr uint64_t kSlotBytes = 256u << 10;
constexpr uint64_t kChannelBytes = 1u << 20;  // buffer for messages of rank 0
constexpr uint64_t kLineBytes = 64;

// State that a rank publishes.
struct RoomMember {
  SharedFlag given;  // pieces it has written to its slots
  SharedFlag reduced;  // pieces whose part of the sum it has computed
  SharedFlag heard;  // lines of the channel it has read
  SharedFlag passed;  // pieces it has written for the next stage
  SharedFlag taken;  // pieces it has read of the stage before
  SharedFlag loaded;  // 1: its device is ready
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> entered, left;
  std::atomic<uint64_t> process_start;
};

class Room {
 public:
  // path: a memory file shared by the ranks, such as /proc/self/fd/N of a memfd; empty for rank 0. num_ranks: on other
  // ranks the number stated by rank 0, or 0.
  static Status Open(const std::string& path, uint32_t rank, uint32_t num_ranks, std::shared_ptr<Room>* out);
  // Adds a rank made of threads of this process to a room in its memory.
  static Status Join(const std::shared_ptr<Room>& other, uint32_t rank, std::shared_ptr<Room>* out);
  // Reports in a room that a rank has ended and why; for the process that started it.
  static Status Report(const std::string& path, uint32_t rank, const std::string& why);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t num_ranks() const { return num_ranks_; }
  RoomMember& member(uint32_t rank) const;
  RoomMember& own() const { return member(rank_); }
  SharedFlag& said() const;  // lines of the channel that rank 0 has written
  char* slot(uint32_t rank, uint32_t turn) const;
  // Memory of sums of a stage, by its first rank.
  char* sums(uint32_t rank, uint32_t turn) const;
  char* channel() const;
  // Gives each rank an outbox of so many bytes, for what it passes on. Only used ones take memory. Every rank calls it
  // once, with the same size, before it passes on anything.
  Status MakeOutboxes(uint64_t bytes);
  char* outbox(uint32_t rank) const;

  // Waits for a flag, spinning for spin_ns before it sleeps. False once a rank has failed.
  bool Await(SharedFlag* flag, uint32_t target, uint64_t spin_ns) const;
  // The first failure is kept.
  void Fail(uint32_t rank, const std::string& why) const;
  bool failed() const;
  Status status() const;

 private:
  struct Header;
  struct Mapping;
  Room(std::shared_ptr<Mapping> mapping, uint32_t rank, uint32_t num_ranks);
  Status Enter();
  Header& header() const;
  void MissMembers() const;

  std::shared_ptr<Mapping> mapping_;
  uint32_t rank_, num_ranks_;
};

}  // namespace llmc
