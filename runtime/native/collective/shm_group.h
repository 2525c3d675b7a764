// ShmGroup: ranks of one host that share a room.
#pragma once
#include <memory>
#include <string>

#include "collective/channel.h"
#include "collective/group.h"
#include "collective/room.h"

namespace llmc {

class ShmGroup final : public Group {
 public:
  explicit ShmGroup(std::shared_ptr<Room> room) : room_(std::move(room)), speaker_(room_), listener_(room_) {}

  uint32_t rank() const override { return room_->rank(); }
  uint32_t num_ranks() const override { return room_->num_ranks(); }
  const char* transport() const override { return "shm"; }
  Status Say(const void* data, uint64_t bytes) override { return speaker_.Say(data, bytes); }
  Status Hear(void* data, uint64_t bytes, uint64_t spin_ns) override { return listener_.Hear(data, bytes, spin_ns); }
  Status TellLoaded() override;
  Status AwaitLoaded() override;
  void Leave() override;
  void AwaitLeft() override;
  void Fail(uint32_t rank, const std::string& why) override { room_->Fail(rank, why); }
  bool failed() const override { return room_->failed(); }
  Status status() const override { return room_->status(); }
  std::shared_ptr<Collective> NewCollective(uint32_t ranks_of_stage, uint64_t outbox_bytes) override;

 private:
  std::shared_ptr<Room> room_;
  Speaker speaker_;
  Listener listener_;
};

}  // namespace llmc
