// GpuSampling: draws a step's tokens on the device that has its logits, by kernels of the artifact. Subclasses copy and
// launch for their kind of device.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/sample_jobs.h"
#include "sampling/sampler.h"

namespace llmc {

// Kernels of an artifact that draw tokens: the index of each stage's kernel, and constants that they share with the
// device.
struct SampleKernels {
  std::array<uint32_t, kNumSampleStages> of_stage{};
  uint32_t block = 0, candidates = 0;
  bool any = false;  // false: the host draws

  static Status Of(const Artifact& artifact, SampleKernels* out);
};

// The memories of SampleSizes, as a kind of device holds them.
template <class Buffer>
struct SampleMemories {
  Buffer upload, scratch, result;

  // The one that an operand is in; nullptr for logits, which the step has.
  const Buffer* Of(SampleOperand operand) const {
    if (operand == SampleOperand::kLogits) return nullptr;
    return operand < SampleOperand::kLogits ? &upload : operand < SampleOperand::kResults ? &scratch : &result;
  }
};

class GpuSampling {
 public:
  virtual ~GpuSampling() = default;
  GpuSampling(const GpuSampling&) = delete;
  GpuSampling& operator=(const GpuSampling&) = delete;

  // Draws from rows of the step's logits, behind all earlier work. Tasks that no kernel handles are drawn by the host.
  Status Draw(const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes);
  // Runs every kernel with zero rows, to the end.
  Status RunEmpty();
  uint64_t num_on_device() const { return num_on_device_; }
  uint64_t num_on_host() const { return num_on_host_; }

 protected:
  GpuSampling(const Artifact& artifact, const SampleKernels& kernels);
  const SampleSizes& sizes() const { return sizes_; }
  // Copies to the upload memory, behind earlier work; `from` stays valid until Finish.
  virtual Status Write(const unsigned char* from, uint64_t bytes) = 0;
  virtual Status Launch(SampleStage stage, uint32_t groups) = 0;
  // Copies from the result memory, behind earlier work; it has arrived after Finish.
  virtual Status Read(uint64_t begin, uint64_t bytes, unsigned char* to) = 0;
  // Copies a row of logits and waits for it.
  virtual Status ReadRow(uint32_t row, float* to) = 0;
  // Waits for all earlier work.
  virtual Status Finish() = 0;

 private:
  Status RunRound();

  SampleSizes sizes_;
  SampleJobs jobs_;
  Sampler host_;
  std::vector<unsigned char> read_;
  std::vector<float> row_;
  std::vector<size_t> left_;  // tasks for the host
  uint64_t num_on_device_ = 0, num_on_host_ = 0;
};

}  // namespace llmc
