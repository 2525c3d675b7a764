// CPU time of the engine's thread between a step's end and the next one's begin, with steps that overlap and without: what
// a device waits for at least. The device is simulated and draws by itself. Prints microseconds a step.
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "device/simulated/simulated_device.h"
#include "engine/engine.h"

namespace {

using llmc::Phase;
using llmc::Status;

uint64_t CpuNs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

class TimedDevice final : public llmc::SimulatedDevice {
 public:
  TimedDevice(llmc::ModelShape model, std::vector<llmc::SimulatedGraph> graphs, uint32_t num_blocks,
              llmc::Overlap overlap)
      : SimulatedDevice(std::move(model), std::move(graphs), {num_blocks, 0}, {}), overlap_(overlap) {}
  llmc::Overlap overlap() const override { return overlap_; }
  bool samples() const override { return true; }
  Status Enqueue(const llmc::StepBatch& batch, llmc::Fence* fence) override {
    if (decodes_ && ended_ns_ != 0) ns += CpuNs() - ended_ns_;
    decodes_ = batch.num_tokens == batch.num_seqs;
    steps += decodes_;
    return SimulatedDevice::Enqueue(batch, fence);
  }
  Status Sample(llmc::Fence, const std::vector<llmc::SampleTask>& tasks,
                std::vector<llmc::SampleOutcome>* outcomes) override {
    for (size_t i = 0; i < tasks.size(); ++i) (*outcomes)[i].result.token = static_cast<int32_t>(i % 97 + 1);
    ended_ns_ = CpuNs();
    return Status::Ok();
  }

  uint64_t ns = 0, steps = 0;

 private:
  llmc::Overlap overlap_;
  bool decodes_ = false;
  uint64_t ended_ns_ = 0;
};

// Decodes `batch` sequences of 1,000 tokens side by side, and takes their events after each step.
double Microseconds(uint32_t batch, llmc::Overlap overlap) {
  constexpr uint32_t kPrompt = 1000, kTokens = 1000;
  llmc::ModelShape model{};
  model.num_layers = 1;
  model.block_size = 16;
  model.vocab_size = 256;
  model.max_model_len = 4096;
  model.max_num_seqs = static_cast<int32_t>(batch);
  model.kv_block_bytes = 64;
  model.graphs = {{Phase::kPrefill, 1, 1024, 1024, 1, 1, 256}, {Phase::kDecode, batch, 256, batch, batch, batch, 256}};
  const llmc::ReplayCost cost{{1}, {1000}, 0};
  auto made = std::make_unique<TimedDevice>(model, std::vector<llmc::SimulatedGraph>(model.graphs.size(), {cost, cost}),
                                            batch * 160 + 1, overlap);
  TimedDevice* device = made.get();
  std::unique_ptr<llmc::Engine> engine;
  llmc::EngineOptions options;
  options.prefix_cache = false;
  if (!llmc::Engine::Create(std::move(made), options, &engine).ok()) std::exit(1);
  const std::vector<int32_t> prompt(kPrompt, 5);
  for (uint32_t i = 0; i < batch; ++i) {
    llmc_sampling_params sampling;
    llmc_sampling_params_init(&sampling, sizeof(sampling));
    sampling.temperature = 0;
    sampling.ignore_eos = 1;
    sampling.max_tokens = kTokens;
    llmc_request request;
    llmc_request_init(&request, sizeof(request));
    request.prompt_token_ids = prompt.data();
    request.num_prompt_tokens = prompt.size();
    request.sampling = &sampling;
    uint64_t id = 0;
    if (!engine->Submit(request, &id).ok()) std::exit(1);
  }
  std::vector<llmc_event> events(256);
  for (bool more = true; more;) {
    if (!engine->Step(&more).ok()) std::exit(1);
    events[0].struct_size = sizeof(llmc_event);
    while (engine->Poll(events.data(), events.size()) == events.size()) events[0].struct_size = sizeof(llmc_event);
  }
  return static_cast<double>(device->ns) / static_cast<double>(device->steps) / 1000;
}

}  // namespace

int main() {
  std::printf("sequences  one after the other  overlapping\n");
  for (const uint32_t batch : {1u, 16u, 64u, 256u}) {
    const double before = Microseconds(batch, llmc::Overlap::kNone);
    std::printf("%9u %20.2f %12.2f\n", batch, before, Microseconds(batch, llmc::Overlap::kPrepared));
  }
  return 0;
}
