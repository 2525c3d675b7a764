// ShmCollective: ranks of one host that add up in the memory of a room. A message is sent in pieces. A small piece is
// summed completely by every rank. A large one is divided: each rank sums a part, and all read the sums. What a stage
// passes on is copied to the outbox of the rank that gives, from which the other one copies it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/room.h"

namespace llmc {

class ShmCollective final : public Collective {
 public:
  // ranks_of_stage: divides the ranks of the room, which then has outboxes; 0: all are one stage.
  explicit ShmCollective(std::shared_ptr<Room> room, uint32_t ranks_of_stage = 0)
      : room_(std::move(room)), ranks_of_stage_(ranks_of_stage != 0 ? ranks_of_stage : room_->num_ranks()) {}

  uint32_t rank() const override { return room_->rank(); }
  uint32_t num_ranks() const override { return room_->num_ranks(); }
  uint32_t ranks_of_stage() const override { return ranks_of_stage_; }
  void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) override;
  void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) override;
  void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) override;
  Status status() const override { return room_->status(); }

 private:
  // A message in the outbox: where, and the number of its last piece.
  struct Lying {
    uint64_t begin, end;
    uint32_t number;
  };

  // The last arriving thread of the rank sets its flag.
  void Arrive(SharedFlag* flag, std::atomic<uint32_t>* arrived, uint32_t num_threads, uint32_t value);
  // Of the stage.
  bool AwaitAll(SharedFlag RoomMember::* flag, uint32_t value) const;
  const float* Given(uint32_t rank, uint32_t turn, const float* own) const;
  // Waits until nothing lies between two bytes of the outbox.
  bool AwaitPlace(uint64_t begin, uint64_t end) const;
  void Lay(uint64_t begin, uint64_t end, uint32_t number);

  std::shared_ptr<Room> room_;
  uint32_t ranks_of_stage_;
  alignas(128) std::atomic<uint32_t> given_{0};
  alignas(128) std::atomic<uint32_t> reduced_{0};
  alignas(128) std::atomic<uint32_t> passed_{0};
  std::vector<Lying> lying_;  // written by the last thread that gives, after all have read it
};

}  // namespace llmc
