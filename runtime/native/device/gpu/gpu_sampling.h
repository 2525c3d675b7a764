// GpuSampling: draws a step's tokens on the device that has its logits, by kernels of the artifact. Subclasses copy and
// launch for their kind of device.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/device.h"
#include "device/sample_jobs.h"
#include "sampling/sampler.h"

namespace llmc {

// Whether no command calls a kernel, which draws tokens behind a step.
bool DrawsTokens(const KernelRecord& kernel);

// Kernels of an artifact that draw tokens: the index of each stage's kernel, and constants that they share with the
// device.
struct SampleKernels {
  std::array<uint32_t, kNumSampleStages> of_stage{};
  uint32_t block = 0, candidates = 0;
  bool any = false;  // false: the host draws
  bool feeds = false;  // has the kernel that gives tokens to the next step

  static Status Of(const Artifact& artifact, SampleKernels* out);
};

// The memories of SampleSizes, as a kind of device holds them.
template <class Buffer>
struct SampleMemories {
  Buffer upload, scratch, result;

  // The one that an operand is in; nullptr for logits and input ids, which steps have.
  const Buffer* Of(SampleOperand operand) const {
    if (operand == SampleOperand::kLogits || operand == SampleOperand::kInputIds) return nullptr;
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
  // Begin, Mark, Feed and End draw behind a step and give the tokens to the next one, for artifacts with feeds().
  // Begin enqueues draws, for End. *begun: false if kernels cannot do all of them at once; then nothing was enqueued.
  Status Begin(const std::vector<SampleTask>& tasks, bool* begun);
  // Marks rows among the input ids of the next step. Feed replaces them by the tokens of the draws that Begin enqueued.
  void Mark(const std::vector<DrawnRow>& rows, int32_t* input_ids) const;
  Status Feed(uint32_t num_tokens);
  // Waits for the draws that Begin enqueued. *lost: some are left to the host, and their logits are gone.
  Status End(const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes, bool* lost);
  // Runs every kernel with zero rows, to the end. The next step has no tokens.
  Status RunEmpty();
  bool feeds() const { return feeds_; }
  // Appends the statistics of draws. of: nullptr where the host draws.
  static void AddStats(const GpuSampling* of, std::vector<DeviceStat>* out);

 protected:
  GpuSampling(const Artifact& artifact, const SampleKernels& kernels);
  const SampleSizes& sizes() const { return sizes_; }
  bool has(SampleStage stage) const { return feeds_ || stage != SampleStage::kFeed; }
  // Copies to the upload memory, behind earlier work; `from` stays valid until Finish.
  virtual Status Write(const unsigned char* from, uint64_t bytes) = 0;
  virtual Status Launch(SampleStage stage, uint32_t groups) = 0;
  // Copies from the result memory, behind earlier work; it has arrived after Finish or Arrive.
  virtual Status Read(uint64_t begin, uint64_t bytes, unsigned char* to) = 0;
  // Arrive waits for all that was enqueued before Close, and for nothing behind it.
  virtual Status Close() = 0;
  virtual Status Arrive() = 0;
  // Copies a row of logits and waits for it.
  virtual Status ReadRow(uint32_t row, float* to) = 0;
  // Waits for all earlier work.
  virtual Status Finish() = 0;

 private:
  Status EnqueueRound();

  SampleSizes sizes_;
  SampleJobs jobs_;
  Sampler host_;
  std::vector<unsigned char> read_;
  std::vector<float> row_;
  std::vector<size_t> left_;  // tasks for the host
  const bool feeds_;
  uint32_t num_alone_ = 0;  // steps that Begin refuses, because the host had to draw of late
  uint64_t num_on_device_ = 0, num_on_host_ = 0;  // tasks
  uint64_t num_chained_ = 0, num_repeated_ = 0;  // steps that End waited for, and those that were lost
};

// What steps may overlap on a device that draws so. sampling: nullptr where the host draws.
inline Overlap OverlapOf(const GpuSampling* sampling) {
  return sampling != nullptr && sampling->feeds() ? Overlap::kChained : Overlap::kPrepared;
}

}  // namespace llmc
