#include "device/opencl/cl_sampling.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace llmc {
namespace {

constexpr uint32_t kStageFact = 4, kBlockFact = 5, kCandidatesFact = 6;
constexpr uint32_t kMostBlock = 64, kMostCandidates = 1024;
constexpr uint32_t kMostGroupsOfJobs = 1 << 16;

}  // namespace

ClSampling::ClSampling(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const SampleSizes& sizes,
                       cl_command_queue queue)
    : machine_(std::move(machine)),
      sizes_(sizes),
      queue_(queue),
      jobs_(sizes, artifact.shape().eos_token_ids),
      host_(artifact.shape().vocab_size, artifact.shape().eos_token_ids),
      read_(sizes.result_bytes),
      row_(sizes.vocab) {}

ClSampling::~ClSampling() {
  for (cl_kernel kernel : kernels_) {
    if (kernel != nullptr) (*machine_)->ReleaseKernel(kernel);
  }
}

Status ClSampling::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                        const ClMemory& memory, cl_command_queue queue, std::unique_ptr<ClSampling>* out) {
  uint32_t of_stage[kNumSampleStages], found = 0;
  std::fill_n(of_stage, kNumSampleStages, UINT32_MAX);
  for (uint32_t i = 0; i < artifact.kernels().size(); ++i) {
    const uint32_t stage = artifact.kernels()[i].launch[kStageFact];
    if (stage == 0) continue;
    const bool known = stage <= kNumSampleStages && of_stage[stage - 1] == UINT32_MAX &&
                       artifact.kernels()[i].num_buffers == OperandsOf(static_cast<SampleStage>(stage - 1)).size();
    if (!known) {
      return artifact.Corrupt("graphs.bin", std::string("kernel '") + artifact.symbol(artifact.kernels()[i]) +
                                                "' is of no stage of sampling");
    }
    of_stage[stage - 1] = i;
    ++found;
  }
  if (found == 0) return Status::Ok();
  const KernelRecord& any = artifact.kernels()[*std::min_element(of_stage, of_stage + kNumSampleStages)];
  const uint32_t block = any.launch[kBlockFact], candidates = any.launch[kCandidatesFact];
  if (found != kNumSampleStages || block == 0 || block > kMostBlock || candidates == 0 ||
      candidates > kMostCandidates) {
    return artifact.Corrupt("graphs.bin", "it has " + std::to_string(found) + " of " +
                                              std::to_string(kNumSampleStages) + " kernels that draw tokens");
  }
  const SampleSizes sizes(static_cast<uint32_t>(artifact.shape().vocab_size),
                          static_cast<uint32_t>(artifact.shape().max_model_len), block, candidates);
  std::unique_ptr<ClSampling> made(new ClSampling(std::move(machine), artifact, sizes, queue));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    LLMC_RETURN_IF_ERROR(programs.Another(of_stage[stage], &made->kernels_[stage]));
    made->items_[stage] = programs.launch(of_stage[stage]).items;
  }
  LLMC_RETURN_IF_ERROR(memory.Allocate("what is drawn", sizes.upload_bytes, kClMemReadOnly, &made->upload_));
  LLMC_RETURN_IF_ERROR(memory.Allocate("drawing tokens", sizes.scratch_bytes, kClMemReadWrite, &made->scratch_));
  LLMC_RETURN_IF_ERROR(memory.Allocate("drawn tokens", sizes.result_bytes, kClMemReadWrite, &made->result_));
  *out = std::move(made);
  return Status::Ok();
}

cl_mem ClSampling::MemoryOf(SampleOperand operand, const ClBuffer& logits) const {
  if (operand == SampleOperand::kLogits) return logits.get();
  return (operand < SampleOperand::kLogits ? upload_ : operand < SampleOperand::kResults ? scratch_ : result_).get();
}

Status ClSampling::Launch(SampleStage stage, uint32_t groups, const ClBuffer& logits) const {
  const ClMachine& cl = *machine_;
  cl_kernel kernel = kernels_[static_cast<uint32_t>(stage)];
  cl_uint index = 0;
  cl_int code = kClSuccess;
  const auto set = [&](size_t bytes, const void* value) {
    const cl_int set_code = cl->SetKernelArg(kernel, index++, bytes, value);
    if (code == kClSuccess) code = set_code;
  };
  for (const SampleOperand operand : OperandsOf(stage)) {
    cl_mem memory = MemoryOf(operand, logits);
    set(sizeof(cl_mem), static_cast<const void*>(&memory));
  }
  for (const SampleOperand operand : OperandsOf(stage)) {
    const auto at = static_cast<cl_int>(sizes_.offset(operand) / kAlignment);
    set(sizeof(at), &at);
  }
  cl_mem scalars = upload_.get();
  set(sizeof(cl_mem), static_cast<const void*>(&scalars));
  LLMC_RETURN_IF_CL_ERROR("Giving a kernel its arguments on '" + cl.name() + "'", code);
  const size_t items = items_[static_cast<uint32_t>(stage)], all = items * std::min(groups, kMostGroupsOfJobs);
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + cl.name() + "'",
                          cl->EnqueueNDRangeKernel(queue_, kernel, 1, nullptr, &all, &items, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::RunRound(const ClBuffer& logits) {
  const ClMachine& cl = *machine_;
  LLMC_RETURN_IF_CL_ERROR("Copying what is drawn to '" + cl.name() + "'",
                          cl->EnqueueWriteBuffer(queue_, upload_.get(), kClFalse, 0, jobs_.upload_bytes(),
                                                 jobs_.upload(), 0, nullptr, nullptr));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    const uint32_t groups = jobs_.groups(static_cast<SampleStage>(stage));
    if (groups > 0) LLMC_RETURN_IF_ERROR(Launch(static_cast<SampleStage>(stage), groups, logits));
  }
  const std::string reading = "Reading drawn tokens from '" + cl.name() + "'";
  if (jobs_.told_bytes() > 0) {
    LLMC_RETURN_IF_CL_ERROR(
        reading, cl->EnqueueReadBuffer(queue_, result_.get(), kClFalse, jobs_.told_begin(), jobs_.told_bytes(),
                                       read_.data() + jobs_.told_begin(), 0, nullptr, nullptr));
  }
  const uint64_t drawn = jobs_.drawn_bytes();
  LLMC_RETURN_IF_CL_ERROR(reading, drawn == 0 ? cl->Finish(queue_)
                                              : cl->EnqueueReadBuffer(queue_, result_.get(), kClTrue, 0, drawn,
                                                                      read_.data(), 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Draw(const ClBuffer& logits, const std::vector<SampleTask>& tasks,
                        std::vector<SampleOutcome>* outcomes) {
  const ClMachine& cl = *machine_;
  left_.clear();
  for (size_t first = 0; first < tasks.size();) {
    first = jobs_.List(tasks, first);
    const Status status = RunRound(logits);
    if (!status.ok()) {
      static_cast<void>(cl->Finish(queue_));  // nothing may still read what the next round writes
      return status;
    }
    jobs_.Finish(tasks, read_.data(), outcomes, &left_);
  }
  for (const size_t index : left_) {
    SampleTask task = tasks[index];
    LLMC_RETURN_IF_CL_ERROR(
        "Reading logits from '" + cl.name() + "'",
        cl->EnqueueReadBuffer(queue_, logits.get(), kClTrue, uint64_t{task.row} * sizes_.vocab * sizeof(float),
                              uint64_t{sizes_.vocab} * sizeof(float), row_.data(), 0, nullptr, nullptr));
    task.row = 0;
    (*outcomes)[index] = host_.Do(task, row_.data());
  }
  num_on_host_ += left_.size();
  num_on_device_ += tasks.size() - left_.size();
  return Status::Ok();
}

Status ClSampling::RunEmpty(const ClBuffer& logits) {
  static_cast<void>(jobs_.List({}, 0));
  LLMC_RETURN_IF_ERROR(RunRound(logits));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    LLMC_RETURN_IF_ERROR(Launch(static_cast<SampleStage>(stage), 1, logits));
  }
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + machine_->name() + "'", (*machine_)->Finish(queue_));
  return Status::Ok();
}

}  // namespace llmc
