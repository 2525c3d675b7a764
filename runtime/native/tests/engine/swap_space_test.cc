// When blocks of preempted sequences go to the host's memory, and how they come back.
#include "engine/swap_space.h"

#include "support/engine_harness.h"

using namespace llmc_test;
using llmc::SwapSpace;

namespace {

void TestWhatPays() {
  SwapSpace space;
  CHECK(!space.open() && !space.Pays(1, 100));
  space.Open(4, false);
  CHECK(!space.Pays(1, 100));  // nothing was measured
  space.SetCosts(1000, 100);
  CHECK(space.Pays(1, 11) && !space.Pays(1, 10));
  CHECK(space.Pays(4, 64) && !space.Pays(5, 1000) && !space.Pays(0, 1000));
  SwapSpace always;
  always.Open(4, true);
  CHECK(always.Pays(4, 1) && !always.Pays(5, 1000));
}

// What is given back may still be read in this step.
void TestPlaces() {
  SwapSpace space;
  space.Open(2, true);
  std::vector<uint32_t> places = {space.Take(), space.Take()};
  CHECK(places[0] != places[1] && space.num_used() == 2);
  space.GiveBack(&places);
  CHECK(places.empty() && space.num_used() == 0 && !space.Pays(1, 1));
  space.NextStep();
  CHECK(space.Pays(2, 1));
  static_cast<void>(space.Take());
  space.Clear();
  CHECK(space.num_used() == 0 && space.Pays(2, 1));
}

// Two texts that the pool has no room for: one gives way, is saved and comes back, without a token computed twice.
void TestNothingIsComputedTwice() {
  ModelShape shape = Shape(4, 64, 2);
  AddGraph(&shape, Phase::kPrefill, 32, 2, 16);
  AddGraph(&shape, Phase::kDecode, 2, 2, 16);
  for (const bool swaps : {false, true}) {
    EngineOptions options;
    options.prefix_cache = false;
    options.swap_bytes = swaps ? 16 * shape.kv_block_bytes : 0;
    options.swap_always = true;
    NullDevice* device;
    auto engine = Make(shape, 9, options, &device);
    std::vector<Job> jobs(2);
    Outputs outputs;
    Needs needs;
    for (size_t i = 0; i < jobs.size(); ++i) {
      jobs[i].prompt.assign(10, static_cast<int32_t>(i + 3));
      jobs[i].params = Params();
      jobs[i].params.max_tokens = 16;
      jobs[i].params.ignore_eos = 1;
      CHECK_OK(Submit(engine.get(), &jobs[i]));
    }
    for (bool more = true; more;) {
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      Drain(engine.get(), &outputs, &needs);
    }
    for (const Job& job : jobs) Compare(outputs[{job.id, 0}], Reference(job, 0, 32));
    const llmc_engine_stats stats = engine->Stats();
    CHECK(stats.num_preemptions > 0);
    CHECK_EQ(device->loads > 0, swaps);
    CHECK_EQ(device->saves, device->loads);
    // Of each text all but the last token, once.
    CHECK_EQ(stats.scheduled_tokens == 2 * (10 + 16 - 1), swaps);
  }
}

void TestBadSizes() {
  ModelShape shape = Shape(4, 64, 2);
  AddGraph(&shape, Phase::kPrefill, 32, 2, 16);
  EngineOptions options;
  options.swap_bytes = shape.kv_block_bytes - 1;
  std::unique_ptr<llmc::Engine> engine;
  const llmc::Status status = llmc::Engine::Create(std::make_unique<NullDevice>(shape, 9), options, &engine);
  CHECK(!status.ok() && engine == nullptr);
  CHECK(status.message.find("swap_bytes is") != std::string::npos);
}

}  // namespace

int main() {
  TestWhatPays();
  TestPlaces();
  TestNothingIsComputedTwice();
  TestBadSizes();
  return Finish("swap_space_test");
}
