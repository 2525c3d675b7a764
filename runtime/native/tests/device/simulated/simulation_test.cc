// The simulated device and a trace through it: times that can be worked out by hand.
#include "device/simulated/simulation.h"

#include <vector>

#include "capi/c_engine.h"
#include "support/check.h"

namespace {

using namespace llmc;

void TestCurve() {
  const ReplayCost constant{{64}, {500}, 0};
  CHECK(constant(1, 1e9) == 500 && constant(1000, 0) == 500);
  const ReplayCost curve{{8, 16, 32}, {100, 200, 600}, 0.5};
  CHECK(curve(1, 0) == 100);
  CHECK(curve(8, 10) == 105);
  CHECK(curve(12, 0) == 150);
  CHECK(curve(16, 0) == 200);
  CHECK(curve(24, 2) == 401);
  CHECK(curve(40, 0) == 800);
}

struct Made {
  llmc_engine* engine = nullptr;
  ~Made() { llmc_engine_destroy(engine); }
};

// Prefill of 64 tokens in 1000 ns, decode of 2 sequences and 256 tokens in 100 ns; exact: 10 ns a token, 40 ns a sequence.
llmc_status Make(Made* made, uint32_t num_blocks = 64, double step_ns = 7, double token_ns = 1,
                 const llmc_sim_model& more = {}) {
  static const uint32_t at[] = {1, 64};
  static const double prefill_ns[] = {1000}, decode_ns[] = {100}, prefill_exact[] = {10, 640},
                      decode_exact[] = {40, 2560};
  llmc_sim_cost costs[4] = {{sizeof(llmc_sim_cost), 1, at, prefill_ns, 0},
                            {sizeof(llmc_sim_cost), 2, at, prefill_exact, 0},
                            {sizeof(llmc_sim_cost), 1, at, decode_ns, 0},
                            {sizeof(llmc_sim_cost), 2, at, decode_exact, 0}};
  llmc_sim_graph graphs[2] = {{sizeof(llmc_sim_graph), 0, 1, 64, 64, 1, 1, 16, &costs[0], &costs[1], 0, 0},
                              {sizeof(llmc_sim_graph), 1, 2, 256, 2, 2, 2, 16, &costs[2], &costs[3], 0, 0}};
  llmc_sim_model model = more;
  model.struct_size = sizeof(model);
  model.num_graphs = 2;
  model.block_size = 16;
  model.max_model_len = 256;
  model.max_num_seqs = 2;
  model.kv_block_bytes = 1;
  model.graphs = graphs;
  model.step_ns = step_ns;
  model.token_ns = token_ns;
  llmc_engine_options options;
  llmc_engine_options_init(&options, sizeof(options));
  options.num_blocks = num_blocks;
  return llmc_engine_create_simulated(&model, &options, &made->engine, nullptr);
}

struct Requests {
  std::vector<uint64_t> arrival, first, last, prefix_start;
  std::vector<uint32_t> prompt, output;
  std::vector<int64_t> prefix_ids;

  void Add(uint64_t at, uint32_t prompt_tokens, uint32_t output_tokens) {
    arrival.push_back(at);
    prompt.push_back(prompt_tokens);
    output.push_back(output_tokens);
  }
  llmc_status Run(llmc_engine* engine, uint32_t (*progress)(void*, uint64_t) = nullptr) {
    first.assign(arrival.size(), 99);
    last.assign(arrival.size(), 99);
    llmc_sim_trace t{};
    t.struct_size = sizeof(t);
    t.prefix_block = 32;
    t.num_requests = arrival.size();
    t.arrival_ns = arrival.data();
    t.prompt_tokens = prompt.data();
    t.output_tokens = output.data();
    t.prefix_start = prefix_start.empty() ? nullptr : prefix_start.data();
    t.prefix_ids = prefix_ids.data();
    t.progress = progress;
    return llmc_engine_simulate(engine, &t, first.data(), last.data(), nullptr);
  }
};

std::vector<llmc_sim_load> Loads(const llmc_engine* engine) {
  std::vector<llmc_sim_load> loads(16);
  loads[0].struct_size = sizeof(llmc_sim_load);
  uint64_t count = 0;
  CHECK(llmc_engine_get_simulated_loads(engine, loads.data(), loads.size(), &count, nullptr) == LLMC_OK);
  loads.resize(count);
  return loads;
}

void TestTimesByHand() {
  Made made;
  CHECK(Make(&made) == LLMC_OK);
  Requests r;
  r.Add(5000, 50, 3);     // idle until it arrives
  r.Add(5500, 100, 1);    // two chunks: 64, then 36
  r.Add(90000, 10, 1);    // idle again
  CHECK(r.Run(made.engine) == LLMC_OK);
  // Prefill 1000 + 7 + 1 for its token; the second has arrived, and prefill and decode alternate.
  CHECK(r.first[0] == 6008);
  // decode 108, chunk 1007 (no token), decode 108.
  CHECK(r.last[0] == 6008 + 108 + 1007 + 108);
  CHECK(r.first[1] == r.last[0] + 1008);
  CHECK(r.last[1] == r.first[1]);
  CHECK(r.first[2] == 91008 && r.last[2] == 91008);

  const std::vector<llmc_sim_load> loads = Loads(made.engine);
  CHECK(loads.size() == 5);  // prefill of 10, 36, 50 and 64 tokens, decode up to 64
  uint64_t tokens = 0, replays = 0;
  for (const llmc_sim_load& load : loads) {
    CHECK(load.num_seqs == 1);
    tokens += load.tokens;
    replays += load.replays;
    if (load.graph == 1) CHECK(load.length == 64 && load.replays == 2 && load.contexts == 51 + 52 && load.ns == 200);
    if (load.graph == 1) CHECK(load.exact_ns == 80 && load.longest == 51 + 52);
    if (load.graph == 0) CHECK(load.longest == load.length);
    if (load.graph == 0 && load.length == 36) CHECK(load.tokens == 36 && load.ns == 1000 && load.exact_ns == 360);
  }
  CHECK(tokens == 50 + 64 + 36 + 10 + 2 && replays == 6);
}

void TestStagesWorkAtTheSameTime() {
  // Three stages of 10 each, two steps in flight.
  SimulatedStages stages(3, 2, 0);
  CHECK(stages.Begin(0, 30, 0) == 10);
  CHECK(stages.Begin(10, 30, 0) == 20);
  CHECK(stages.End(0) == 30 && stages.End(1) == 40);
  // Behind a slow step, a quick one waits at each stage.
  CHECK(stages.Begin(50, 300, 0) == 150);
  CHECK(stages.Begin(150, 3, 0) == 151);
  CHECK(stages.Begin(151, 3, 0) == 152);
  // Now both places of the first stage are taken, until the second one begins the quick step.
  CHECK(stages.Begin(152, 3, 0) == 250);
  CHECK(stages.End(2) == 350 && stages.End(3) == 351 && stages.End(5) == 353);
  CHECK(stages.End(2) == 353);  // long ago

  SimulatedStages alone(1, 5, 0.5);
  CHECK(alone.steps_in_flight() == 1 && alone.Begin(7, 30, 30) == 37 && alone.End(0) == 37);
}

void TestStagesShareABus() {
  // Each stage takes 3/4 of the bus while it reads. Two that read at once are 2/3 as fast.
  SimulatedStages stages(2, 2, 0.75);
  CHECK(stages.Begin(0, 60, 60) == 30);
  double end = stages.Begin(30, 60, 60);
  CHECK(end == 75 && stages.End(0) == 75);
  for (uint64_t i = 2; i < 10; ++i) {
    const double next = stages.Begin(end, 60, 60);
    CHECK(next == end + 45 && stages.End(i - 1) == next);
    end = next;
  }
  // Alone, a stage has the bus: the step that is left takes no longer than by itself.
  CHECK(stages.End(9) == end + 30);
  // Half of the time of each step reads: the bus is enough for both.
  SimulatedStages half(2, 2, 0.75);
  CHECK(half.Begin(0, 60, 30) == 30 && half.Begin(30, 60, 30) == 60);
  // A stage that only computes is not slowed down.
  SimulatedStages mixed(2, 2, 1);
  CHECK(mixed.Begin(0, 60, 60) == 30 && mixed.Begin(30, 20, 0) == 40 && mixed.End(0) == 60 && mixed.End(1) == 70);
}

void TestSharedPrefixesAreFound() {
  for (const bool shared : {true, false}) {
    Made made;
    CHECK(Make(&made) == LLMC_OK);
    Requests r;
    r.Add(0, 100, 1);
    r.Add(100000, 100, 1);
    // Of the second prompt's 32 + 32 + 36 tokens, the first 64 are those of the first prompt.
    r.prefix_ids = {11, 12, 13, 11, shared ? 12 : 14, 15};
    r.prefix_start = {0, 3, 6};
    CHECK(r.Run(made.engine) == LLMC_OK);
    llmc_engine_stats stats{};
    stats.struct_size = sizeof(stats);
    CHECK(llmc_engine_get_stats(made.engine, &stats, nullptr) == LLMC_OK);
    CHECK(stats.prefix_hit_tokens == (shared ? 64u : 32u));
    CHECK(llmc_engine_check_integrity(made.engine, nullptr) == LLMC_OK);
  }
}

void TestSameTraceSameTimes() {
  std::vector<uint64_t> before;
  for (int round = 0; round < 2; ++round) {
    Made made;
    CHECK(Make(&made, 12) == LLMC_OK);  // a pool that preempts
    Requests r;
    for (uint32_t i = 0; i < 200; ++i) r.Add(i * 700, 1 + i * 37 % 120, 1 + i * 13 % 60);
    CHECK(r.Run(made.engine) == LLMC_OK);
    for (size_t i = 0; i < r.last.size(); ++i) CHECK(r.first[i] > r.arrival[i] && r.last[i] >= r.first[i]);
    if (round == 1) CHECK(r.last == before);
    before = r.last;
    llmc_engine_stats stats{};
    stats.struct_size = sizeof(stats);
    CHECK(llmc_engine_get_stats(made.engine, &stats, nullptr) == LLMC_OK);
    CHECK(stats.num_preemptions > 0 && stats.num_finished == 200);
  }
}

void TestProgressStops() {
  Made made;
  CHECK(Make(&made) == LLMC_OK);
  Requests r;
  for (uint32_t i = 0; i < 500; ++i) r.Add(0, 10, 100);
  CHECK(r.Run(made.engine, [](void*, uint64_t) { return 1u; }) == LLMC_OK);
  CHECK(r.last.front() > 0 && r.last.back() == 0);
}

void TestWhatIsRefused() {
  Made made;
  CHECK(Make(&made, 64, -1) == LLMC_ERR_INVALID_ARGUMENT && made.engine == nullptr);
  CHECK(Make(&made) == LLMC_OK);
  const auto refused = [&](Requests r) { return r.Run(made.engine) == LLMC_ERR_INVALID_ARGUMENT; };
  CHECK(refused({}));
  Requests r;
  r.Add(0, 256, 1);
  CHECK(refused(r));
  r.prompt = {0};
  CHECK(refused(r));
  r.prompt = {10};
  r.output = {0};
  CHECK(refused(r));
  r.output = {1};
  r.prefix_start = {1, 0};
  CHECK(refused(r));
  r.prefix_start.clear();
  r.Add(5, 1, 1);
  r.arrival = {5, 4};
  CHECK(refused(r));
}

}  // namespace

int main() {
  TestCurve();
  TestTimesByHand();
  TestStagesWorkAtTheSameTime();
  TestStagesShareABus();
  TestSharedPrefixesAreFound();
  TestSameTraceSameTimes();
  TestProgressStops();
  TestWhatIsRefused();
  return llmc_test::Finish("simulation_test");
}
