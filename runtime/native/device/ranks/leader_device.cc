#include "device/ranks/leader_device.h"

#include <time.h>

#include <utility>

#include "core/clock.h"

namespace llmc {

LeaderDevice::LeaderDevice(std::shared_ptr<Room> room, std::unique_ptr<RankSpeaker> speaker,
                           std::unique_ptr<Device> own)
    : room_(std::move(room)), speaker_(std::move(speaker)), own_(std::move(own)) {}

Status LeaderDevice::Create(std::shared_ptr<Room> room, std::unique_ptr<RankSpeaker> speaker,
                            std::unique_ptr<Device> own, std::unique_ptr<Device>* out) {
  std::unique_ptr<LeaderDevice> leader(new LeaderDevice(std::move(room), std::move(speaker), std::move(own)));
  for (uint32_t r = 1; r < leader->room_->num_ranks(); ++r) {
    if (!leader->room_->Await(&leader->room_->member(r).loaded, 1, 0)) return leader->room_->status();
  }
  *out = std::move(leader);
  return Status::Ok();
}

// Until they have left, or for a while: who ends this device may look whether a process is left behind.
LeaderDevice::~LeaderDevice() {
  constexpr uint64_t kMostNs = 2'000'000'000;
  constexpr timespec kPause = {0, 1'000'000};
  if (!speaker_->Say(RankOp::kEnd).ok()) return;
  const uint64_t start = MonotonicNs();
  for (uint32_t r = 1; r < room_->num_ranks(); ++r) {
    while (room_->member(r).left.load(std::memory_order_acquire) == 0 && !room_->failed() &&
           MonotonicNs() - start < kMostNs) {
      ::nanosleep(&kPause, nullptr);
    }
  }
}

Status LeaderDevice::NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
  static_cast<void>(artifact), static_cast<void>(out);
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                       "A device of several ranks takes no graphs once it was made; start anew with the artifact that "
                       "has them.");
}

Status LeaderDevice::BeforeStep() {
  LLMC_RETURN_IF_ERROR(room_->status());
  return own_->BeforeStep();
}

// What this rank would refuse no other one is told.
Status LeaderDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), ViewOf(batch)));
  LLMC_RETURN_IF_ERROR(speaker_->Say(RankOp::kStep, batch));
  return own_->Enqueue(batch, fence);
}

Status LeaderDevice::CopyBlock(uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(own_->CopyBlock(from, to));
  return speaker_->Say(RankOp::kCopyBlock, from, to);
}

// An error of these is that of the next step, too.
void LeaderDevice::Reserve(const StepBatch& batch) {
  if (speaker_->Say(RankOp::kReserve, batch).ok()) own_->Reserve(batch);
}

void LeaderDevice::Visit(uint32_t graph) {
  if (speaker_->Say(RankOp::kVisit, graph).ok()) own_->Visit(graph);
}

void LeaderDevice::Release(uint32_t graph) {
  if (speaker_->Say(RankOp::kRelease, graph).ok()) own_->Release(graph);
}

void LeaderDevice::Recall() {
  if (speaker_->Say(RankOp::kRecall).ok()) own_->Recall();
}

void LeaderDevice::GetStats(std::vector<DeviceStat>* out) const {
  own_->GetStats(out);
  uint64_t alive = room_->failed() ? 0 : room_->num_ranks();
  out->push_back({"ranks", room_->num_ranks()});
  out->push_back({"working_ranks", alive});
}

}  // namespace llmc
