// ClSampling: draws the tokens of a step on the device that has its logits, by kernels that the artifact brings.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/opencl/cl_memory.h"
#include "device/opencl/cl_programs.h"
#include "device/sample_jobs.h"
#include "sampling/sampler.h"

namespace llmc {

class ClSampling {
 public:
  // *out stays empty where the artifact has no such kernels.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                     const ClMemory& memory, cl_command_queue queue, std::unique_ptr<ClSampling>* out);
  ~ClSampling();
  ClSampling(const ClSampling&) = delete;
  ClSampling& operator=(const ClSampling&) = delete;

  // Draws of rows of `logits`, behind what is in the queue; what no kernel does, the host does.
  Status Draw(const ClBuffer& logits, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes);
  // Runs every kernel for no row, to the end.
  Status RunEmpty(const ClBuffer& logits);
  uint64_t num_on_device() const { return num_on_device_; }
  uint64_t num_on_host() const { return num_on_host_; }

 private:
  ClSampling(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const SampleSizes& sizes,
             cl_command_queue queue);
  Status Launch(SampleStage stage, uint32_t groups, const ClBuffer& logits) const;
  cl_mem MemoryOf(SampleOperand operand, const ClBuffer& logits) const;
  Status RunRound(const ClBuffer& logits);

  std::shared_ptr<const ClMachine> machine_;
  SampleSizes sizes_;
  cl_command_queue queue_;
  cl_kernel kernels_[kNumSampleStages] = {};
  size_t items_[kNumSampleStages] = {};
  ClBuffer upload_, scratch_, result_;
  SampleJobs jobs_;
  Sampler host_;
  std::vector<unsigned char> read_;
  std::vector<float> row_;
  std::vector<size_t> left_;  // tasks that the host does
  uint64_t num_on_device_ = 0, num_on_host_ = 0;
};

}  // namespace llmc
