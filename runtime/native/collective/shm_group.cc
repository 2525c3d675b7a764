#include "collective/shm_group.h"

#include <time.h>

#include "collective/shm_collective.h"
#include "core/clock.h"

namespace llmc {

Status ShmGroup::TellLoaded() {
  room_->own().loaded.Set(1);
  return Status::Ok();
}

Status ShmGroup::AwaitLoaded() {
  for (uint32_t r = 1; r < num_ranks(); ++r) {
    if (!room_->Await(&room_->member(r).loaded, 1, 0)) return status();
  }
  return Status::Ok();
}

void ShmGroup::Leave() { room_->own().left.store(1, std::memory_order_release); }

// Waits until the other ranks have left, so that no process is left behind when this rank's device is freed.
void ShmGroup::AwaitLeft() {
  constexpr uint64_t kMostNs = 2'000'000'000;
  constexpr timespec kPause = {0, 1'000'000};
  const uint64_t start = MonotonicNs();
  for (uint32_t r = 1; r < num_ranks(); ++r) {
    while (room_->member(r).left.load(std::memory_order_acquire) == 0 && !failed() && MonotonicNs() - start < kMostNs) {
      ::nanosleep(&kPause, nullptr);
    }
  }
}

std::shared_ptr<Collective> ShmGroup::NewCollective(uint32_t ranks_of_stage, uint64_t outbox_bytes) {
  if (outbox_bytes > 0) {
    if (const Status made = room_->MakeOutboxes(outbox_bytes); !made.ok()) {
      Fail(rank(), made.message);
      return nullptr;
    }
  }
  return std::make_shared<ShmCollective>(room_, ranks_of_stage);
}

}  // namespace llmc
