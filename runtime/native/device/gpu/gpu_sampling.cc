#include "device/gpu/gpu_sampling.h"

#include <algorithm>
#include <string>

namespace llmc {
namespace {

constexpr uint32_t kStageFact = 4, kBlockFact = 5, kCandidatesFact = 6;
constexpr uint32_t kMostBlock = 64, kMostCandidates = 1024;
constexpr uint32_t kMostGroupsOfJobs = 1 << 16;
constexpr uint32_t kFeedItems = 64;  // rows per group
constexpr uint32_t kStepsAlone = 64;  // after a step that had to run again

uint64_t NumWanted(const std::vector<SampleTask>& tasks) {
  return static_cast<uint64_t>(
      std::count_if(tasks.begin(), tasks.end(), [](const SampleTask& task) { return !task.unwanted; }));
}

}  // namespace

bool DrawsTokens(const KernelRecord& kernel) { return kernel.launch[kStageFact] != 0; }

Status SampleKernels::Of(const Artifact& artifact, SampleKernels* out) {
  uint32_t found = 0;
  *out = {};
  out->of_stage.fill(UINT32_MAX);
  for (uint32_t i = 0; i < artifact.kernels().size(); ++i) {
    const uint32_t stage = artifact.kernels()[i].launch[kStageFact];
    if (stage == 0) continue;
    const bool known = stage <= kNumSampleStages && out->of_stage[stage - 1] == UINT32_MAX &&
                       artifact.kernels()[i].num_buffers == OperandsOf(static_cast<SampleStage>(stage - 1)).size();
    if (!known) {
      return artifact.Corrupt("graphs.bin", std::string("kernel '") + artifact.symbol(artifact.kernels()[i]) +
                                                "' is of no stage of sampling");
    }
    out->of_stage[stage - 1] = i;
    ++found;
  }
  if (found == 0) return Status::Ok();
  const KernelRecord& first = artifact.kernels()[*std::min_element(out->of_stage.begin(), out->of_stage.end())];
  out->block = first.launch[kBlockFact], out->candidates = first.launch[kCandidatesFact];
  out->feeds = out->of_stage[static_cast<uint32_t>(SampleStage::kFeed)] != UINT32_MAX;
  // Artifacts of level 0 have no kernel that feeds.
  if (found != kNumSampleStages - (out->feeds ? 0 : 1) || out->block == 0 || out->block > kMostBlock ||
      out->candidates == 0 || out->candidates > kMostCandidates) {
    return artifact.Corrupt("graphs.bin", "it has " + std::to_string(found) + " of " +
                                              std::to_string(kNumSampleStages) + " kernels that draw tokens");
  }
  out->any = true;
  return Status::Ok();
}

GpuSampling::GpuSampling(const Artifact& artifact, const SampleKernels& kernels)
    : sizes_(static_cast<uint32_t>(artifact.shape().vocab_size), static_cast<uint32_t>(artifact.shape().max_model_len),
             kernels.block, kernels.candidates),
      jobs_(sizes_, artifact.shape().eos_token_ids),
      host_(artifact.shape().vocab_size, artifact.shape().eos_token_ids),
      read_(sizes_.result_bytes),
      row_(sizes_.vocab),
      feeds_(kernels.feeds) {}

Status GpuSampling::EnqueueRound() {
  LLMC_RETURN_IF_ERROR(Write(jobs_.upload(), jobs_.upload_bytes()));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    const uint32_t groups = jobs_.groups(static_cast<SampleStage>(stage));
    if (groups == 0) continue;
    LLMC_RETURN_IF_ERROR(Launch(static_cast<SampleStage>(stage), std::min(groups, kMostGroupsOfJobs)));
  }
  if (jobs_.told_bytes() > 0) {
    LLMC_RETURN_IF_ERROR(Read(jobs_.told_begin(), jobs_.told_bytes(), read_.data() + jobs_.told_begin()));
  }
  if (jobs_.drawn_bytes() > 0) LLMC_RETURN_IF_ERROR(Read(0, jobs_.drawn_bytes(), read_.data()));
  return Status::Ok();
}

Status GpuSampling::Begin(const std::vector<SampleTask>& tasks, bool* begun) {
  *begun = false;
  if (num_alone_ > 0) --num_alone_;
  if (!feeds_ || num_alone_ > 0 || jobs_.List(tasks, 0) < tasks.size() || jobs_.leaves_any()) return Status::Ok();
  LLMC_RETURN_IF_ERROR(EnqueueRound());
  *begun = true;
  return Close();
}

void GpuSampling::Mark(const std::vector<DrawnRow>& rows, int32_t* input_ids) const {
  for (const DrawnRow& one : rows) input_ids[one.row] = -1 - static_cast<int32_t>(jobs_.ResultOf(one.task));
}

Status GpuSampling::Feed(uint32_t num_tokens) {
  return Launch(SampleStage::kFeed, (num_tokens + kFeedItems - 1) / kFeedItems);
}

Status GpuSampling::End(const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes, bool* lost) {
  LLMC_RETURN_IF_ERROR(Arrive());
  left_.clear();
  jobs_.Finish(tasks, read_.data(), outcomes, &left_);
  *lost = !left_.empty();
  ++num_chained_;
  num_repeated_ += *lost;
  if (*lost) num_alone_ = kStepsAlone;
  num_on_device_ += *lost ? 0 : NumWanted(tasks);
  return Status::Ok();
}

Status GpuSampling::Draw(const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
  left_.clear();
  for (size_t first = 0; first < tasks.size();) {
    first = jobs_.List(tasks, first);
    Status status = EnqueueRound();
    if (status.ok()) status = Finish();
    if (!status.ok()) {
      static_cast<void>(Finish().ok());  // nothing may still read what the next round writes
      return status;
    }
    jobs_.Finish(tasks, read_.data(), outcomes, &left_);
  }
  for (const size_t index : left_) {
    SampleTask task = tasks[index];
    LLMC_RETURN_IF_ERROR(ReadRow(task.row, row_.data()));
    task.row = 0;
    (*outcomes)[index] = host_.Do(task, row_.data());
  }
  num_on_host_ += left_.size();
  num_on_device_ += NumWanted(tasks) - left_.size();
  return Status::Ok();
}

void GpuSampling::AddStats(const GpuSampling* of, std::vector<DeviceStat>* out) {
  out->push_back({"drawn_on_device", of == nullptr ? 0 : of->num_on_device_});
  out->push_back({"drawn_on_host", of == nullptr ? 0 : of->num_on_host_});
  out->push_back({"chained_steps", of == nullptr ? 0 : of->num_chained_});
  out->push_back({"repeated_steps", of == nullptr ? 0 : of->num_repeated_});
}

Status GpuSampling::RunEmpty() {
  static_cast<void>(jobs_.List({}, 0));
  LLMC_RETURN_IF_ERROR(EnqueueRound());
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    if (has(static_cast<SampleStage>(stage))) LLMC_RETURN_IF_ERROR(Launch(static_cast<SampleStage>(stage), 1));
  }
  return Finish();
}

}  // namespace llmc
