#include "device/ranks/leader_device.h"

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "device/ranks/overlap_rule.h"

namespace llmc {
namespace {

constexpr int kTimedSteps = 3;  // the first one may wait for pages

// A step of one row, whose key and value go to the dummy block, and its state to the dummy slot.
StepBatch OneRow(const ModelShape& model, uint32_t graph) {
  StepBatch batch;
  batch.graph = graph;
  batch.num_tokens = batch.num_seqs = batch.block_table_stride = 1;
  batch.input_ids = batch.positions = batch.slot_mapping = batch.block_tables = {0};
  batch.context_lens = {1};
  batch.query_start = {0, 1};
  if (model.recurrent()) batch.state_slots.assign(kStateFields, 0);
  return batch;
}

}  // namespace

LeaderDevice::LeaderDevice(std::shared_ptr<Group> group, std::unique_ptr<RankSpeaker> speaker,
                           std::unique_ptr<Device> own, std::shared_ptr<ClockedCollective> clocked)
    : group_(std::move(group)), speaker_(std::move(speaker)), own_(std::move(own)), clocked_(std::move(clocked)) {}

Status LeaderDevice::Create(std::shared_ptr<Group> group, std::unique_ptr<RankSpeaker> speaker,
                            std::unique_ptr<Device> own, std::shared_ptr<ClockedCollective> clocked, uint32_t overlap,
                            uint64_t summed_bytes, std::unique_ptr<Device>* out) {
  std::unique_ptr<LeaderDevice> leader(
      new LeaderDevice(std::move(group), std::move(speaker), std::move(own), std::move(clocked)));
  LLMC_RETURN_IF_ERROR(leader->group_->AwaitLoaded());
  LLMC_RETURN_IF_ERROR(leader->ChooseOverlap(overlap, summed_bytes));
  *out = std::move(leader);
  return Status::Ok();
}

Status LeaderDevice::ChooseOverlap(uint32_t overlap, uint64_t summed_bytes) {
  if (overlap == 0 || !own_->cuts_steps()) return Status::Ok();
  uint32_t rows = overlap;
  if (overlap == kMeasuredOverlap) LLMC_RETURN_IF_ERROR(MeasureOverlap(summed_bytes, &rows));
  if (rows == 0) return Status::Ok();
  LLMC_RETURN_IF_ERROR(speaker_->Say(RankOp::kCutSteps, rows));
  return Told(own_->CutSteps(rows));
}

Status LeaderDevice::MeasureOverlap(uint64_t summed_bytes, uint32_t* rows) {
  *rows = 0;
  if (!clocked_->overlaps()) return Status::Ok();
  OverlapCosts costs;
  LLMC_RETURN_IF_ERROR(speaker_->Say(RankOp::kTimeSums));
  costs.row_ns = TimeOfSummedByte(clocked_.get()) * static_cast<double>(summed_bytes);
  const std::vector<GraphShape>& graphs = model().graphs;
  const auto fewer = [](const GraphShape& a, const GraphShape& b) { return a.max_tokens < b.max_tokens; };
  const auto [least, most] = std::minmax_element(graphs.begin(), graphs.end(), fewer);
  const StepBatch batch = OneRow(model(), static_cast<uint32_t>(least - graphs.begin()));
  uint64_t pass_ns = UINT64_MAX;
  for (int i = 0; i < kTimedSteps; ++i) {
    const uint64_t start = MonotonicNs();
    Fence fence = 0;
    LLMC_RETURN_IF_ERROR(BeforeStep());
    LLMC_RETURN_IF_ERROR(Enqueue(batch, &fence));
    LLMC_RETURN_IF_ERROR(Await(fence));
    pass_ns = std::min(pass_ns, MonotonicNs() - start);
  }
  clocked_->Forget();  // these were no steps of a request
  costs.pass_ns = static_cast<double>(pass_ns);
  *rows = LeastOverlapRows(costs, most->max_tokens);
  return group_->status();
}

LeaderDevice::~LeaderDevice() {
  if (!speaker_->Say(RankOp::kEnd).ok()) return;
  // What this rank has passed on is taken before the link ends.
  own_.reset();
  clocked_.reset();
  group_->AwaitLeft();
  group_->Leave();
}

Status LeaderDevice::NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
  static_cast<void>(artifact), static_cast<void>(out);
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                       "A device of several ranks takes no graphs once it was made; start anew with the artifact that "
                       "has them.");
}

Status LeaderDevice::BeforeStep() {
  LLMC_RETURN_IF_ERROR(group_->status());
  return own_->BeforeStep();
}

// Checks first: a batch that this rank refuses is not sent to the others.
Status LeaderDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), num_states(), ViewOf(batch)));
  LLMC_RETURN_IF_ERROR(speaker_->Say(RankOp::kStep, batch));
  return Told(own_->Enqueue(batch, fence));
}

Status LeaderDevice::Wait(Fence fence, const float** logits) { return Told(own_->Wait(fence, logits)); }

// The other ranks may be waiting for a result that will not come. So this is the end of all, even if the own device goes
// on.
Status LeaderDevice::Told(Status status) {
  if (status.ok()) return status;
  if (!group_->failed()) group_->Fail(group_->rank(), status.message);
  const bool lost = status.code == LLMC_ERR_DEVICE_LOST;
  return Status::Error(lost ? LLMC_ERR_DEVICE_LOST : LLMC_ERR_INTERNAL, std::move(status.message));
}

Status LeaderDevice::OpenSwapSpace(uint32_t num_places, uint32_t num_state_places, uint64_t* ns, uint64_t* state_ns) {
  static_cast<void>(num_places), static_cast<void>(num_state_places), static_cast<void>(ns);
  static_cast<void>(state_ns);
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "A device of several ranks has no swap space; leave it out.");
}

Status LeaderDevice::CopyBlock(uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(own_->CopyBlock(from, to));
  return speaker_->Say(RankOp::kCopyBlock, from, to);
}

Status LeaderDevice::CopyState(uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(own_->CopyState(from, to));
  return speaker_->Say(RankOp::kCopyState, from, to);
}

// Errors of these calls are not lost: the next step returns them, too.
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
  const uint64_t alive = group_->failed() ? 0 : group_->num_ranks();
  out->push_back({"ranks", group_->num_ranks()});
  out->push_back({"working_ranks", alive});
  const CollectiveTime &sums = clocked_->reductions(), &gathered = clocked_->gatherings(),
                       &passed = clocked_->passings();
  out->push_back({"all_reduces", sums.count.load(std::memory_order_relaxed)});
  out->push_back({"all_reduce_ns", sums.ns.load(std::memory_order_relaxed)});
  out->push_back({"all_reduce_hidden_ns", clocked_->hidden_ns()});
  out->push_back({"all_gathers", gathered.count.load(std::memory_order_relaxed)});
  out->push_back({"all_gather_ns", gathered.ns.load(std::memory_order_relaxed)});
  out->push_back({"pass_ons", passed.count.load(std::memory_order_relaxed)});
  out->push_back({"pass_on_ns", passed.ns.load(std::memory_order_relaxed)});
}

}  // namespace llmc
