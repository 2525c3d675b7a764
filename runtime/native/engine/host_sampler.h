// Samples the tokens of a step on the host. Rows are independent, so the device's host threads share them.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "sampling/sampler.h"

namespace llmc {

class HostSampler {
 public:
  // Allocates all its memory here: several rows of the vocabulary's size per thread.
  explicit HostSampler(const Device& device);
  // *outcomes: one per task. Throws std::bad_alloc, after all threads have finished.
  void Draw(Device* device, const float* logits, const std::vector<SampleTask>& tasks,
            std::vector<SampleOutcome>* outcomes);

 private:
  std::vector<Sampler> samplers_;  // one for each thread
};

}  // namespace llmc
