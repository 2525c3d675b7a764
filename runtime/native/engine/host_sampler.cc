#include "engine/host_sampler.h"

#include <algorithm>
#include <atomic>
#include <new>

namespace llmc {

HostSampler::HostSampler(const Device& device) {
  constexpr uint32_t kMost = 8;
  const uint32_t threads = std::clamp(device.num_host_threads(), 1u, kMost);
  const ModelShape& model = device.model();
  for (uint32_t i = 0; i < threads; ++i) samplers_.emplace_back(model.vocab_size, model.eos_token_ids);
}

void HostSampler::Draw(Device* device, const float* logits, const std::vector<SampleTask>& tasks,
                       std::vector<SampleOutcome>* outcomes) {
  struct Shared {
    const float* logits;
    const SampleTask* tasks;
    Sampler* samplers;
    SampleOutcome* outcomes;
    std::atomic<bool> out_of_memory{false};
  } shared{logits, tasks.data(), samplers_.data(), outcomes->data(), {}};
  device->ForEach(
      static_cast<uint32_t>(tasks.size()), static_cast<uint32_t>(samplers_.size()),
      [](void* context, uint32_t index, uint32_t worker) {
        Shared& all = *static_cast<Shared*>(context);
        if (all.tasks[index].unwanted) return;
        try {
          all.outcomes[index] = all.samplers[worker].Do(all.tasks[index], all.logits);
        } catch (const std::bad_alloc&) {
          all.out_of_memory = true;
        }
      },
      &shared);
  if (shared.out_of_memory) throw std::bad_alloc();
}

}  // namespace llmc
