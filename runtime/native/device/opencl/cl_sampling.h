// ClSampling: the kernels that draw tokens, in an OpenCL queue.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/gpu/gpu_sampling.h"
#include "device/gpu/step_inputs.h"
#include "device/opencl/cl_memory.h"
#include "device/opencl/cl_programs.h"

namespace llmc {

class ClSampling final : public GpuSampling {
 public:
  // *out stays empty if the artifact has no such kernels.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                     const ClMemory& memory, cl_command_queue queue, std::unique_ptr<ClSampling>* out);
  ~ClSampling() override;

  // Sets the logits of the next draws, which they must outlive.
  void set_logits(const ClBuffer& logits) { logits_ = logits.get(); }
  // Sets the inputs of the step that Feed feeds, which they must outlive. layout: of its graph.
  void set_inputs(const ClBuffer& step, const StepLayout& layout) {
    step_ = step.get();
    input_ids_at_ = layout.offsets[kInputIds];
  }

 private:
  ClSampling(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const SampleKernels& kernels,
             cl_command_queue queue)
      : GpuSampling(artifact, kernels), machine_(std::move(machine)), queue_(queue) {}
  Status Write(const unsigned char* from, uint64_t bytes) override;
  Status Launch(SampleStage stage, uint32_t groups) override;
  Status Read(uint64_t begin, uint64_t bytes, unsigned char* to) override;
  Status Close() override;
  Status Arrive() override;
  Status ReadRow(uint32_t row, float* to) override;
  Status Finish() override;
  ClPlace PlaceOf(SampleOperand operand) const;
  void ReleaseDrawn();

  std::shared_ptr<const ClMachine> machine_;
  cl_command_queue queue_;
  cl_kernel kernels_[kNumSampleStages] = {};
  size_t items_[kNumSampleStages] = {};
  SampleMemories<ClBuffer> memories_;
  cl_mem logits_ = nullptr, step_ = nullptr;
  uint64_t input_ids_at_ = 0;
  cl_event drawn_ = nullptr;  // set by Close
};

}  // namespace llmc
