// Draws the tokens of a step on the host: rows do not depend on each other, so the device's host threads share them.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "sampling/sampler.h"

namespace llmc {

class HostSampler {
 public:
  // Takes all memory that it needs; several rows of the vocabulary's size for each thread.
  explicit HostSampler(const Device& device);
  // *outcomes: one for each task. Throws std::bad_alloc, once no thread is at work any more.
  void Draw(Device* device, const float* logits, const std::vector<SampleTask>& tasks,
            std::vector<SampleOutcome>* outcomes);

 private:
  std::vector<Sampler> samplers_;  // one for each thread
};

}  // namespace llmc
