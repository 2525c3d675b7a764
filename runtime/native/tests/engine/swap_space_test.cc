// When blocks of preempted sequences go to the host's memory, and how they come back.
#include "engine/swap_space.h"

#include "support/engine_harness.h"

using namespace llmc_test;
using llmc::SwapSpace;

namespace {

void TestWhatPays() {
  SwapSpace space;
  CHECK(!space.open() && !space.Pays(1, false, 100));
  space.Open(4, 0, false);
  CHECK(!space.Pays(1, false, 100));  // nothing was measured
  space.SetCosts({1000, 5000, 100});
  CHECK(space.Pays(1, false, 11) && !space.Pays(1, false, 10));
  CHECK(space.Pays(4, false, 64) && !space.Pays(5, false, 1000) && !space.Pays(0, false, 1000));
  CHECK(!space.Pays(1, true, 1000));  // there is no place for states
  SwapSpace always;
  always.Open(4, 1, true);
  CHECK(always.Pays(4, true, 1) && !always.Pays(5, true, 1000));
  static_cast<void>(always.states.Take());
  CHECK(always.Pays(4, false, 1) && !always.Pays(1, true, 1000));
  SwapSpace with_states;
  with_states.Open(4, 2, false);
  with_states.SetCosts({1000, 5000, 100});
  CHECK(with_states.Pays(1, true, 61) && !with_states.Pays(1, true, 60));
}

// What is given back may still be read in this step.
void TestPlaces() {
  SwapSpace space;
  space.Open(2, 1, true);
  std::vector<uint32_t> places = {space.blocks.Take(), space.blocks.Take()}, states = {space.states.Take()};
  CHECK(places[0] != places[1] && space.blocks.num_used() == 2 && space.states.num_used() == 1);
  space.blocks.GiveBack(&places);
  space.states.GiveBack(&states);
  CHECK(places.empty() && states.empty() && space.blocks.num_used() == 0 && !space.Pays(1, false, 1));
  space.NextStep();
  CHECK(space.Pays(2, true, 1));
  static_cast<void>(space.blocks.Take());
  space.Clear();
  CHECK(space.blocks.num_used() == 0 && space.Pays(2, true, 1));
}

// Two texts that the pool has no room for: one gives way, is saved and comes back, without a token computed twice.
void TestNothingIsComputedTwice() {
  ModelShape shape = Shape(4, 64, 2);
  AddGraph(&shape, Phase::kPrefill, 32, 2, 16);
  AddGraph(&shape, Phase::kDecode, 2, 2, 16);
  for (const int round : {0, 1, 2, 3}) {
    const bool swaps = round % 2 != 0;
    shape.state_bytes = round / 2 * sizeof(NullDevice::State);
    EngineOptions options;
    options.prefix_cache = false;
    options.swap_bytes = swaps ? 16 * (shape.kv_block_bytes + shape.state_bytes) : 0;
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
    CHECK_EQ(device->states_loaded > 0, swaps && shape.recurrent());
    CHECK_EQ(device->states_saved, device->states_loaded);
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
  llmc::Status status = llmc::Engine::Create(std::make_unique<NullDevice>(shape, 9), options, &engine);
  CHECK(!status.ok() && engine == nullptr);
  CHECK(status.message.find("swap_bytes is") != std::string::npos);
  shape.state_bytes = sizeof(NullDevice::State);
  options.swap_bytes = shape.kv_block_bytes + shape.state_bytes - 1;
  status = llmc::Engine::Create(std::make_unique<NullDevice>(shape, 9), options, &engine);
  CHECK(!status.ok() && status.message.find("a KV block and a sequence's states have") != std::string::npos);
}

// The least swap space has room for one sequence of one block, whatever of the two is larger.
void TestLeastSize() {
  for (const uint64_t block_bytes : {1u, 16u, 100000u}) {
    ModelShape shape = Shape(4, 64, 2);
    AddGraph(&shape, Phase::kPrefill, 32, 2, 16);
    shape.state_bytes = sizeof(NullDevice::State);
    shape.kv_block_bytes = block_bytes;
    EngineOptions options;
    options.swap_bytes = shape.kv_block_bytes + shape.state_bytes;
    auto device = std::make_unique<NullDevice>(shape, 9);
    const NullDevice* swaps = device.get();
    std::unique_ptr<llmc::Engine> engine;
    CHECK_OK(llmc::Engine::Create(std::move(device), options, &engine));
    CHECK(swaps->num_places() > 0 && swaps->num_state_places() > 0);
  }
}

}  // namespace

int main() {
  TestWhatPays();
  TestPlaces();
  TestNothingIsComputedTwice();
  TestBadSizes();
  TestLeastSize();
  return Finish("swap_space_test");
}
