// Steps and copies that fail on a device that goes on: each one in turn, in all ways in which steps overlap. Nothing that
// one of them was to write is found again: not in the prefix cache, nor by siblings, in swap space, or by another engine
// that blocks are handed to.
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

struct Way {
  bool late, chains;
  uint32_t in_flight;
  bool recurrent = false;
};

struct Totals {
  uint64_t failures = 0, failed_saves = 0, failed_loads = 0, failed_copies = 0, cached = 0, handed = 0;
  uint64_t states_copied = 0, states_saved = 0, states_loaded = 0;
};

std::unique_ptr<Engine> Tight(const Way& way, NullDevice** device = nullptr) {
  ModelShape shape = Usual();
  shape.kv_block_bytes = static_cast<uint64_t>(shape.block_size) * sizeof(uint64_t);  // of NullDevice
  if (way.recurrent) shape.state_bytes = sizeof(NullDevice::State);
  EngineOptions options;
  options.swap_always = true;
  options.swap_bytes = (shape.kv_block_bytes + shape.state_bytes) * 40;
  options.keep_states_every = 4;
  return Make(shape, 17, options, device);
}

// Two that share a prompt, of which one forks, and two others. They do not have room beside each other.
std::vector<Job> Jobs() {
  std::vector<Job> jobs = {Simple(18, 9), Simple(18, 11), Simple(11, 12), Simple(14, 10)};
  jobs[1].params.n = 2;
  jobs[1].params.temperature = 0.9f;
  jobs[2].prompt[0] = 1;
  jobs[3].prompt[0] = 2;
  return jobs;
}

// A job's prompt and output, asked for more: its blocks of a first run are found if they were registered.
Job Continued(const Job& job, uint32_t index) {
  Job more = Simple(1, 5);
  more.prompt = job.prompt;
  const std::vector<int32_t> tokens = Reference(job, index, 64).tokens;
  more.prompt.insert(more.prompt.end(), tokens.begin(), tokens.end());
  return more;
}

// Gives another engine all blocks of a text that are found.
uint64_t HandOver(Engine* from, Engine* to, const Job& job) {
  std::vector<unsigned char> data(1 << 16);
  // The last token of a prompt is always computed.
  const std::vector<int32_t> tokens(job.prompt.begin(), job.prompt.end() - 1);
  HandedText text{tokens, {}}, same{tokens, {}};
  uint64_t blocks = 0, bytes = 0, taken = 0;
  CHECK_OK(from->ExportBlocks(&text, 0, data.data(), data.size(), &blocks, &bytes));
  if (blocks == 0) return 0;
  CHECK_OK(from->SealBlocks(data.data(), bytes));
  CHECK_OK(to->ImportBlocks(&same, data.data(), bytes, &taken));
  return taken;
}

// Whether the device had that many steps and copies.
bool TestFailureAt(int at, const Way& way, Totals* totals) {
  NullDevice::late = way.late;
  NullDevice::chains = NullDevice::draws = way.chains;
  NullDevice::in_flight = way.in_flight;
  NullDevice* device;
  auto engine = Tight(way, &device);
  device->fail_code = LLMC_ERR_DEVICE_FAILED;
  device->fail_after = at;
  std::vector<Job> jobs = Jobs();
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  for (bool more = true; more;) {
    const Status status = engine->Step(&more);
    more |= !status.ok();
    CHECK(status.ok() || status.code == LLMC_ERR_DEVICE_FAILED);
    totals->failures += !status.ok();
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs);
  }
  for (const Job& job : jobs) {
    for (uint32_t i = 0; i < job.params.n; ++i) {
      const Output& got = outputs[{job.id, i}];
      const Output want = Reference(job, i, 64);
      if (got.kind != LLMC_EVENT_FAILED) {
        Compare(got, want);
        continue;
      }
      CHECK_EQ(got.error, LLMC_ERR_DEVICE_FAILED);
      CHECK(got.tokens.size() <= want.tokens.size() &&
            std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()));
    }
  }
  const bool reached = device->fail_after == 0;
  totals->failed_saves += device->failed_saves;
  totals->failed_loads += device->failed_loads;
  totals->failed_copies += device->failed_copies;
  device->fail_after = 0;

  std::vector<Job> again;
  for (const Job& job : jobs) {
    again.push_back(job);
    for (uint32_t i = 0; i < job.params.n; ++i) again.push_back(Continued(job, i));
  }
  auto other = way.in_flight == 1 ? Tight(way) : nullptr;
  for (Engine* one : {other.get(), engine.get()}) {
    outputs.clear();  // ids of engines are alike
    for (Job& job : again) {
      if (one == nullptr) continue;
      if (one == other.get()) totals->handed += HandOver(engine.get(), one, job);
      CHECK_OK(Submit(one, &job));
      RunAll(one, &outputs);
      for (uint32_t i = 0; i < job.params.n; ++i) Compare(outputs[{job.id, i}], Reference(job, i, 64));
      totals->cached += outputs[{job.id, 0}].num_cached;
    }
  }
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
  totals->states_copied += device->states_copied;
  totals->states_saved += device->states_saved;
  totals->states_loaded += device->states_loaded;
  return reached;
}

}  // namespace

int main() {
  Totals totals;
  for (const Way& way : {Way{false, false, 1}, Way{true, false, 1}, Way{true, true, 1}, Way{true, false, 3},
                         Way{false, false, 1, true}, Way{true, false, 1, true}, Way{true, false, 3, true}}) {
    int at = 1;
    while (TestFailureAt(at, way, &totals)) ++at;
    CHECK(at > 30);
    std::printf("%d steps and copies\n", at);
  }
  for (const uint64_t total :
       {totals.failures, totals.failed_saves, totals.failed_loads, totals.failed_copies, totals.cached, totals.handed,
        totals.states_copied, totals.states_saved, totals.states_loaded}) {
    CHECK(total > 0);
    std::printf("%llu ", static_cast<unsigned long long>(total));
  }
  std::printf("\n");
  return Finish("failed_steps_test");
}
