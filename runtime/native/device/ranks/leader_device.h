// LeaderDevice: rank 0 of several. Passes each call to the other ranks and does its own part. Its callers see one
// device.
#pragma once
#include <memory>
#include <vector>

#include "collective/clocked.h"
#include "device/device.h"
#include "device/ranks/rank_message.h"

namespace llmc {

class LeaderDevice final : public Device {
 public:
  // own: device of this rank, which uses `clocked`. overlap: rows from which on steps are cut, 0 for never, or
  // kMeasuredOverlap. Returns once every rank has loaded its part, or an error once one has failed.
  static Status Create(std::shared_ptr<Group> group, std::unique_ptr<RankSpeaker> speaker, std::unique_ptr<Device> own,
                       std::shared_ptr<ClockedCollective> clocked, uint32_t overlap, uint64_t summed_bytes,
                       std::unique_ptr<Device>* out);
  // Ends the other ranks.
  ~LeaderDevice() override;

  const ModelShape& model() const override { return own_->model(); }
  uint32_t num_blocks() const override { return own_->num_blocks(); }
  uint32_t num_states() const override { return own_->num_states(); }
  Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) override;
  Status BeforeStep() override;
  // Of rank 0 alone: the others have processes of their own, and are asked at the next step.
  Status CheckAlive(uint64_t timeout_ns) override { return own_->CheckAlive(timeout_ns); }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  Status OpenSwapSpace(uint32_t num_places, uint32_t num_state_places, uint64_t* ns, uint64_t* state_ns) override;
  Overlap overlap() const override { return own_->overlap(); }
  uint32_t steps_in_flight() const override { return own_->steps_in_flight(); }
  Status CopyBlock(uint32_t from, uint32_t to) override;
  Status CopyState(uint32_t from, uint32_t to) override;
  void Reserve(const StepBatch& batch) override;
  void Visit(uint32_t graph) override;
  void Release(uint32_t graph) override;
  bool launches(uint32_t graph) const override { return own_->launches(graph); }
  void Recall() override;
  uint32_t num_host_threads() const override { return own_->num_host_threads(); }
  void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) override {
    own_->ForEach(count, num_workers, job, context);
  }
  ReplayTime last_replay() const override { return own_->last_replay(); }
  void GetStats(std::vector<DeviceStat>* out) const override;
  ReplayProfile* profile() override { return own_->profile(); }

 private:
  LeaderDevice(std::shared_ptr<Group> group, std::unique_ptr<RankSpeaker> speaker, std::unique_ptr<Device> own,
               std::shared_ptr<ClockedCollective> clocked);
  // Has all ranks cut steps, if that was asked for or pays. summed_bytes: SummedBytesOfRow.
  Status ChooseOverlap(uint32_t overlap, uint64_t summed_bytes);
  Status MeasureOverlap(uint64_t summed_bytes, uint32_t* rows);
  // Tells the other ranks of an error of this one.
  Status Told(Status status);

  std::shared_ptr<Group> group_;
  std::unique_ptr<RankSpeaker> speaker_;
  std::unique_ptr<Device> own_;
  std::shared_ptr<ClockedCollective> clocked_;
};

}  // namespace llmc
