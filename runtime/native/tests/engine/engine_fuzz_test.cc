// Random models, pools, options and requests, one thread, integrity checked after every step: whatever the batching,
// chunking, prefix hits, preemptions and waits for masks, each request's output equals that of a generator that knows
// nothing of any of these. Of recurrent models, each step finds the state that its first tokens continue from.
#include <functional>
#include <random>

#include "core/clock.h"
#include "support/ranked_reference.h"

using namespace llmc_test;

namespace {

uint64_t total_preemptions = 0, total_cached = 0, total_copies = 0, total_misses = 0, total_mixed = 0, total_masks = 0,
         total_scored = 0, total_timeouts = 0, total_decode_chunks = 0, total_mixed_preemptions = 0,
         total_mixed_hits = 0, total_parked = 0, total_evictions = 0, total_promotions = 0, total_beams = 0,
         total_best_of = 0, total_drafted = 0, total_accepted = 0, total_drafts = 0, total_loads = 0, total_ahead = 0,
         total_thrown = 0, total_chained = 0, total_lost = 0, total_disjoint = 0, total_failed_steps = 0,
         total_failed = 0, total_placed = 0, total_placed_cached = 0;
// Of recurrent models.
uint64_t states_read = 0, states_kept = 0, states_copied = 0, states_saved = 0, states_loaded = 0, states_cached = 0,
         states_ahead = 0, states_thrown = 0, states_disjoint = 0, states_failed = 0, states_guessed = 0;

// Rows in place of some tokens before the last one. Each image has the values that its number says.
void PlaceRows(uint32_t length, bool on_axes, const std::function<uint32_t(uint32_t, uint32_t)>& pick,
               std::vector<Placed>* placed) {
  for (uint32_t at = pick(0, 6); at + 1 < length; at += pick(0, 9)) {
    const uint32_t count = std::min(pick(1, 12), length - 1 - at), image = pick(0, 3);
    placed->push_back({at, {}, static_cast<uint8_t>(16 * image + count), on_axes ? image : 0});
    for (uint32_t i = 0; i < count; ++i) placed->back().values.push_back(static_cast<float>(100 * image + i));
    at += count;
  }
}

void Property(uint32_t seed, bool recurrent) {
  std::mt19937 rng(seed);
  auto pick = [&](uint32_t low, uint32_t high) { return low + static_cast<uint32_t>(rng() % (high - low + 1)); };
  const uint32_t bs = pick(1, 6), max_len = pick(12, 60), max_seqs = pick(1, 8);
  const uint32_t all_blocks = (max_len + bs - 1) / bs;
  ModelShape shape = Shape(static_cast<int32_t>(bs), static_cast<int32_t>(max_len), static_cast<int32_t>(max_seqs));
  shape.state_bytes = recurrent ? sizeof(NullDevice::State) : 0;
  shape.places_rows = shape.takes_states = seed % 5 < 2;
  shape.states_width = shape.places_rows ? kRowWidth : 0;
  shape.rope_axes = seed % 5 == 1 ? kRopeAxes : 0;
  const uint32_t largest = pick(1, max_len + 10);
  for (uint32_t t = 1; t < largest; t += pick(1, 16))
    AddGraph(&shape, Phase::kPrefill, t, pick(1, 4), pick(1, all_blocks));
  AddGraph(&shape, Phase::kPrefill, largest, pick(1, 4), all_blocks);
  for (uint32_t b = 1; b < max_seqs; b *= 2) AddGraph(&shape, Phase::kDecode, b, b, pick(1, all_blocks));
  if (pick(0, 3)) AddGraph(&shape, Phase::kDecode, max_seqs, max_seqs, all_blocks);
  // Room for guesses of all of them.
  if (pick(0, 1)) {
    const uint32_t rows = max_seqs * pick(2, 5);
    AddGraph(&shape, Phase::kDecode, rows, rows, all_blocks);
  }
  for (uint32_t m = pick(0, 2); m > 0; --m) {
    AddGraph(&shape, Phase::kMixed, pick(2, 30), pick(2, max_seqs + 2), pick(0, 3) ? all_blocks : pick(1, all_blocks));
  }
  const bool tight = pick(0, 1);
  const uint32_t blocks = 1 + (tight ? pick(2, all_blocks + 3) : all_blocks * max_seqs);
  EngineOptions options;
  options.max_num_seqs = pick(0, 1) ? 0 : pick(1, max_seqs);
  options.max_tokens_per_step = pick(0, 1) ? 0 : pick(1, largest);
  options.prefix_cache = pick(0, 3) != 0;
  if (pick(0, 3) == 0) options.miss_policy = MissPolicy::kSplit;
  if (pick(0, 1)) options.priority_patience = pick(1, 20);
  options.speculate_tokens = pick(0, 1) ? 0 : pick(1, 9);
  options.speculate_always = pick(0, 3) != 0;
  options.swap_always = pick(0, 1) != 0;
  if (pick(0, 1) != 0) options.swap_bytes = (shape.kv_block_bytes + shape.state_bytes) * pick(1, 2 * blocks);
  options.keep_states_every = pick(0, 1) ? pick(1, 20) : SchedulerOptions::kKeepEvery;
  NullDevice::slots = pick(0, 1) ? 0 : pick(1, 3 * max_seqs);
  const uint32_t reach = std::min(max_len, (blocks - 1) * bs);
  if (reach < 2) return;

  NullDevice* device;
  NullDevice::workers = pick(0, 7) ? 1 : pick(2, 3);
  NullDevice::late = pick(0, 1) != 0;
  NullDevice::chains = pick(0, 1) != 0;
  NullDevice::draws = NullDevice::chains || pick(0, 3) == 0;
  NullDevice::in_flight = pick(0, 2) ? 1 : pick(2, 4);
  std::unique_ptr<Engine> engine;
  if (options.speculate_tokens > 0 && pick(0, 2) == 0) {
    ModelShape draft = Shape(static_cast<int32_t>(pick(1, 5)), static_cast<int32_t>(pick(4, 60)), 4);
    const uint32_t most = static_cast<uint32_t>(draft.max_model_len / draft.block_size) + 1, rows = pick(1, 6);
    AddGraph(&draft, Phase::kPrefill, pick(1, 20), pick(1, 2), pick(1, most));
    for (uint32_t b = 1; b <= rows; ++b) AddGraph(&draft, Phase::kDecode, b, b, pick(1, most));
    engine = MakeDrafted(shape, blocks, options, draft, 1 + pick(1, 3 * most), pick(0, 60), &device);
    ++total_drafts;
  } else {
    engine = Make(shape, blocks, options, &device);
  }
  device->loses = pick(0, 3);
  // Of every fourth device some steps and copies fail, and it goes on.
  std::mt19937 faults(seed);
  const bool fails = seed % 4 == 3;
  device->fail_code = LLMC_ERR_DEVICE_FAILED;
  uint64_t failed_steps = 0;
  std::vector<int32_t> common(reach);
  for (auto& t : common) t = static_cast<int32_t>(pick(0, kVocab - 1));
  std::vector<Placed> common_rows;
  if (shape.places_rows) PlaceRows(reach, shape.rope_axes > 0, pick, &common_rows);
  // Now and then masks are late, so that most of the seats are given away.
  const uint32_t most_guided = pick(0, 2) ? 1 : 3, late = pick(0, 2) ? 1 : 12;
  std::vector<Job> jobs(pick(1, 14));
  Outputs outputs;
  Needs needs;
  size_t submitted = 0;
  int idle = 0;
  for (int step = 0; step < 20000 && idle < 2; ++step) {
    while (submitted < jobs.size() && pick(0, 2)) {
      Job& j = jobs[submitted++];
      const uint32_t length = pick(1, reach - 1), shared = pick(0, length);
      j.prompt.assign(common.begin(), common.begin() + shared);
      while (j.prompt.size() < length) j.prompt.push_back(static_cast<int32_t>(pick(0, kVocab - 1)));
      for (const Placed& one : common_rows) {
        if (one.first + one.values.size() <= std::min(shared, length - 1)) j.placed.push_back(one);
      }
      if (shape.places_rows && pick(0, 3) == 0) {
        j.placed.clear();
        PlaceRows(length, shape.rope_axes > 0, pick, &j.placed);
      }
      j.params = Params();
      j.params.n = pick(0, 3) ? 1 : pick(2, 4);
      j.params.max_tokens = pick(1, 30);
      j.params.min_tokens = pick(0, std::min(3u, j.params.max_tokens));
      j.params.temperature = pick(0, 1) ? 0.0f : 0.9f;
      if (pick(0, 2) == 0) j.params.top_k = static_cast<int32_t>(pick(1, 10));
      if (pick(0, 2) == 0) j.params.top_p = 0.8f;
      if (pick(0, 3) == 0) j.params.repetition_penalty = 1.3f;
      j.params.ignore_eos = pick(0, 1);
      j.params.seed = rng();
      j.params.num_logprobs = static_cast<int32_t>(pick(0, 3)) - 1;
      if (pick(0, 2) == 0) j.stops.push_back(static_cast<int32_t>(pick(0, kVocab - 1)));
      // Few tokens over and over, so that guesses are right now and then.
      if (pick(0, 2) == 0) {
        for (uint32_t i = pick(1, 2); i > 0; --i) j.biases.push_back({static_cast<int32_t>(pick(0, kVocab - 1)), 11});
      }
      j.priority = static_cast<int32_t>(pick(0, 2));
      j.guided = pick(0, 3) < most_guided;
      if (!j.guided && pick(0, 5) == 0) {
        j.params.beam_width = j.params.n + pick(0, 4);
        j.params.length_penalty = static_cast<float>(pick(0, 6)) * 0.5f - 1.0f;
        j.params.early_stopping = pick(0, 2);
        j.params.repetition_penalty = 1;
        j.biases.clear();
      } else if (!j.guided && pick(0, 5) == 0) {
        j.params.best_of = j.params.n + pick(0, 3);
      }
      if (pick(0, 3) == 0) j.num_prompt_logprobs = static_cast<int32_t>(pick(0, 4));
      if (pick(0, 9) == 0) j.deadline_ns = pick(0, 1) ? 1 : MonotonicNs() + pick(1, 500) * 1000;
      CHECK_OK(Submit(engine.get(), &j));
    }
    if (pick(0, 30) == 0 && submitted > 0) {
      Job& j = jobs[pick(0, static_cast<uint32_t>(submitted) - 1)];
      if (engine->Cancel(j.id).ok()) j.cancelled = true;
    }
    bool progressed = true;
    const llmc_engine_stats before = engine->Stats();
    if (fails && device->fail_after == 0 && faults() % 8 == 0) device->fail_after = 1 + static_cast<int>(faults() % 4);
    const Status stepped = engine->Step(&progressed);
    CHECK(stepped.ok() || (fails && stepped.code == LLMC_ERR_DEVICE_FAILED));
    failed_steps += !stepped.ok();
    CHECK_OK(engine->CheckIntegrity());
    const llmc_engine_stats after = engine->Stats();
    const uint32_t seats = options.max_num_seqs ? options.max_num_seqs : max_seqs;
    total_parked += after.num_running > seats * NullDevice::in_flight;
    CHECK(device->last_seqs <= seats);
    if (after.num_mixed_steps > before.num_mixed_steps) {
      CHECK_EQ(after.num_prefill_steps, before.num_prefill_steps + 1);
      CHECK(after.scheduled_tokens - before.scheduled_tokens >= 2);
      if (options.max_tokens_per_step) {
        CHECK(after.scheduled_tokens - before.scheduled_tokens <= options.max_tokens_per_step);
      }
      total_mixed_preemptions += after.num_preemptions > before.num_preemptions;
      total_mixed_hits += after.prefix_hit_tokens > before.prefix_hit_tokens;
    }
    Drain(engine.get(), &outputs, &needs);
    idle = progressed || !stepped.ok() || submitted < jobs.size() || !needs.empty() ? 0 : idle + 1;
    for (size_t i = 0; i < needs.size();) {
      if (pick(0, late) > 0) {
        ++i;
        continue;
      }
      const auto need = needs[i];
      needs[i] = needs.back();
      needs.pop_back();
      const Job& j = *std::find_if(jobs.begin(), jobs.end(), [&](const Job& job) { return job.id == need.first; });
      SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
      ++total_masks;
    }
  }
  CHECK_EQ(idle, 2);
  for (const Job& j : jobs) {
    const std::vector<Output> wanted = ReferenceOutputs(j, reach);
    total_beams += j.params.beam_width > 1;
    total_best_of += j.params.best_of > j.params.n;
    for (uint32_t i = 0; i < j.params.n; ++i) {
      const Output& got = outputs[{j.id, i}];
      const Output& want = wanted[i];
      const bool timeout = got.reason == LLMC_FINISH_TIMEOUT;
      if (timeout) CHECK(j.deadline_ns != 0 && j.deadline_ns <= got.end.time_ns);
      total_timeouts += timeout;
      const bool failed = got.error == LLMC_ERR_DEVICE_FAILED;
      total_failed += failed;
      total_scored += got.prompt.size();
      if (!j.cancelled && !timeout && !failed) {
        Compare(got, want);
      } else {
        CHECK_EQ(got.terminal, 1);
        CHECK(got.prompt.size() <= want.prompt.size() &&
              std::equal(got.prompt.begin(), got.prompt.end(), want.prompt.begin()));
        CHECK(got.tokens.size() <= want.tokens.size() &&
              std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()));
      }
    }
  }
  const llmc_engine_stats s = engine->Stats();
  CHECK(s.num_running == 0 && s.num_waiting == 0 && s.num_free_blocks == s.num_blocks);
  CHECK_EQ(s.num_finished, jobs.size());
  total_preemptions += s.num_preemptions;
  CHECK(s.num_evictions <= s.num_preemptions);
  uint64_t evictions = 0;
  for (const llmc_eviction_count& one : engine->Evictions()) {
    CHECK(one.count > 0 && one.priority >= 0 && one.priority <= 2);
    evictions += one.count;
  }
  CHECK_EQ(evictions, s.num_evictions);
  total_evictions += evictions;
  total_promotions += s.num_promotions;
  total_mixed += s.num_mixed_steps;
  total_cached += s.cached_tokens;
  total_misses += s.num_bucket_misses;
  total_copies += device->copies;
  total_placed += device->rows_placed;
  if (shape.places_rows) total_placed_cached += s.cached_tokens;
  total_drafted += s.drafted_tokens;
  total_accepted += s.accepted_tokens;
  CHECK(s.accepted_tokens <= s.drafted_tokens && s.num_speculative_steps <= s.drafted_tokens);
  CHECK((s.drafted_tokens > 0) <= (options.speculate_tokens > 0));
  total_loads += device->loads;
  const bool disjoint = NullDevice::in_flight > 1;
  CHECK((s.num_ahead_steps > 0) <= (NullDevice::late || disjoint));
  const uint64_t lost = failed_steps * NullDevice::in_flight;  // begun, and given up when one failed
  CHECK(s.num_ahead_steps <= (disjoint ? s.num_steps : s.num_decode_steps) + lost);
  CHECK(s.num_thrown_rows <= s.scheduled_tokens);
  CHECK(device->most_queued <= NullDevice::in_flight);
  total_disjoint += device->most_queued > 1;
  total_ahead += s.num_ahead_steps;
  total_thrown += s.num_thrown_rows;
  CHECK(device->chained_steps - device->lost_steps <= s.num_ahead_steps + failed_steps);
  total_failed_steps += failed_steps;
  total_chained += device->chained_steps;
  total_lost += device->lost_steps;
  total_decode_chunks += device->decode_chunks;
  if (recurrent) {
    CHECK_EQ(device->chained_steps, 0u);
    states_read += device->states_read;
    states_kept += device->states_kept;
    states_copied += device->states_copied;
    states_saved += device->states_saved;
    states_loaded += device->states_loaded;
    states_cached += s.cached_tokens;
    states_ahead += s.num_ahead_steps;
    states_thrown += s.num_thrown_rows;
    states_disjoint += device->most_queued > 1;
    states_failed += failed_steps;
    states_guessed += s.accepted_tokens;
  }
  uint64_t misses = 0;
  for (const llmc_bucket_miss& miss : engine->BucketMisses()) misses += miss.count;
  CHECK(misses == s.num_bucket_misses || engine->BucketMisses().size() == LLMC_MAX_BUCKET_MISSES);
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 600; ++seed) {
    for (const bool recurrent : {false, true}) {
      if (recurrent && seed % 3 != 0) continue;  // one in three, since sanitizers are slow
      const int before = Failures();
      Property(seed, recurrent);
      if (Failures() != before) std::fprintf(stderr, "  seed %u%s\n", seed, recurrent ? ", recurrent" : "");
    }
  }
  // The test must have reached what it is for.
  for (uint64_t total :
       {total_preemptions,  total_cached,  total_copies,    total_misses,        total_mixed,
        total_masks,        total_scored,  total_timeouts,  total_decode_chunks, total_mixed_preemptions,
        total_mixed_hits,   total_parked,  total_evictions, total_promotions,    total_beams,
        total_best_of,      total_drafted, total_accepted,  total_drafts,        total_loads,
        total_ahead,        total_thrown,  total_chained,   total_lost,          total_disjoint,
        total_failed_steps, total_failed,  total_placed,    total_placed_cached, states_read,
        states_kept,        states_copied, states_saved,    states_loaded,       states_cached,
        states_ahead,       states_thrown, states_disjoint, states_failed,       states_guessed}) {
    CHECK(total > 0);
    std::printf("%llu ", static_cast<unsigned long long>(total));
  }
  std::printf("\n");
  return Finish("engine_fuzz_test");
}
