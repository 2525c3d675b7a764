// CuSampling: the kernels that draw tokens, in a CUDA stream.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/cuda/cu_handles.h"
#include "device/cuda/cu_programs.h"
#include "device/gpu/gpu_sampling.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

// Call all functions in a scope of the machine.
class CuSampling final : public GpuSampling {
 public:
  // *out stays empty if the artifact has no such kernels.
  static Status Make(const CuMachinePtr& machine, const Artifact& artifact, std::shared_ptr<const CuPrograms> programs,
                     CuStreamHandle stream, std::unique_ptr<CuSampling>* out);
  // Sets the rows that the next draws read, which must outlive these.
  void set_logits(const CuBuffer& logits) { logits_ = logits.get(); }
  // Sets the inputs of the step that Feed feeds, which must outlive it. layout: of its graph.
  void set_inputs(const CuBuffer& step, const StepLayout& layout) {
    step_ = step.get();
    input_ids_ = step_ + layout.offsets[kInputIds];
  }

 private:
  CuSampling(CuMachinePtr machine, const Artifact& artifact, const SampleKernels& kernels, CuStreamHandle stream)
      : GpuSampling(artifact, kernels), machine_(std::move(machine)), stream_(stream) {}
  Status Write(const unsigned char* from, uint64_t bytes) override;
  Status Launch(SampleStage stage, uint32_t groups) override;
  Status Read(uint64_t begin, uint64_t bytes, unsigned char* to) override;
  Status Close() override;
  Status Arrive() override;
  Status ReadRow(uint32_t row, float* to) override;
  Status Finish() override;
  CuPointer PlaceOf(SampleOperand operand) const;
  void TakeArrived();

  CuMachinePtr machine_;
  CuPointer logits_ = 0, step_ = 0, input_ids_ = 0;
  CuStreamHandle stream_;
  std::shared_ptr<const CuPrograms> programs_;  // keep the kernels loaded
  CuFunction kernels_[kNumSampleStages] = {};
  uint32_t items_[kNumSampleStages] = {};
  SampleMemories<CuBuffer> memories_;
  // A result on its way through pinned memory: with other memory the driver would wait.
  struct Arriving {
    const unsigned char* pinned;
    unsigned char* to;
    uint64_t bytes;
  };
  CuPinned written_, read_;
  std::vector<Arriving> arriving_;
  CuEvent drawn_;
};

}  // namespace llmc
