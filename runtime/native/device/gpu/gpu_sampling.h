// GpuSampling: draws the tokens of a step on the device that has its logits, by kernels that the artifact brings. A kind of
// device says how it copies and launches.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/sample_jobs.h"
#include "sampling/sampler.h"

namespace llmc {

// An artifact's kernels that draw tokens: the index of each stage's, and what they agree on with the device.
struct SampleKernels {
  std::array<uint32_t, kNumSampleStages> of_stage{};
  uint32_t block = 0, candidates = 0;
  bool any = false;  // false: the host draws

  static Status Of(const Artifact& artifact, SampleKernels* out);
};

class GpuSampling {
 public:
  virtual ~GpuSampling() = default;
  GpuSampling(const GpuSampling&) = delete;
  GpuSampling& operator=(const GpuSampling&) = delete;

  // Draws of rows of the step's logits, behind all that was asked for; what no kernel does, the host does.
  Status Draw(const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes);
  // Runs every kernel for no row, to the end.
  Status RunEmpty();
  uint64_t num_on_device() const { return num_on_device_; }
  uint64_t num_on_host() const { return num_on_host_; }

 protected:
  GpuSampling(const Artifact& artifact, const SampleKernels& kernels);
  const SampleSizes& sizes() const { return sizes_; }
  // To the memory of the upload, behind what is in the queue; `from` stays until Finish.
  virtual Status Write(const unsigned char* from, uint64_t bytes) = 0;
  virtual Status Launch(SampleStage stage, uint32_t groups) = 0;
  // Of the memory of the result, behind what is in the queue; it is there after Finish.
  virtual Status Read(uint64_t begin, uint64_t bytes, unsigned char* to) = 0;
  // A row of logits; it is there when this returns.
  virtual Status ReadRow(uint32_t row, float* to) = 0;
  // Waits for all that is in the queue.
  virtual Status Finish() = 0;

 private:
  Status RunRound();

  SampleSizes sizes_;
  SampleJobs jobs_;
  Sampler host_;
  std::vector<unsigned char> read_;
  std::vector<float> row_;
  std::vector<size_t> left_;  // tasks that the host does
  uint64_t num_on_device_ = 0, num_on_host_ = 0;
};

}  // namespace llmc
