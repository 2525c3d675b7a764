// Guesses in the engine: fewer steps, the same tokens, and nothing of a wrong guess left behind.
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

EngineOptions Guessing(uint32_t most) {
  EngineOptions options;
  options.speculate_tokens = most;
  options.speculate_always = true;
  return options;
}

// Writes one token over and over: every guess is right but for the first ones.
Job Repeating(uint32_t length, uint32_t max_tokens) {
  Job job = Simple(length, max_tokens);
  job.biases.push_back({3, 100});
  return job;
}

bool recurrent = false;  // so are models from now on

ModelShape WithRows(std::vector<uint32_t> rows) {
  ModelShape m = Shape(4, 64, 8);
  m.state_bytes = recurrent ? sizeof(NullDevice::State) : 0;
  AddGraph(&m, Phase::kPrefill, 16, 4, 16);
  for (uint32_t b : rows) AddGraph(&m, Phase::kDecode, b, b, 16);
  return m;
}

// A draft has the same graphs, and no states.
ModelShape OfDraft(ModelShape shape) {
  shape.state_bytes = 0;
  return shape;
}

llmc_engine_stats RunOne(Engine* engine, Job* job) {
  Outputs outputs;
  CHECK_OK(Submit(engine, job));
  RunAll(engine, &outputs);
  for (uint32_t k = 0; k < job->params.n; ++k) Compare(outputs[{job->id, k}], Reference(*job, k, 64));
  return engine->Stats();
}

void FewerSteps() {
  NullDevice* device;
  auto engine = Make(WithRows({1, 2, 4, 8}), 33, Guessing(7), &device);
  Job job = Repeating(6, 40);
  const llmc_engine_stats stats = RunOne(engine.get(), &job);
  // One prefill; of steps with 7 guesses each gives 8 tokens.
  CHECK(stats.num_steps <= 9);
  CHECK(stats.num_speculative_steps > 0 && stats.num_speculative_steps <= stats.num_decode_steps);
  CHECK(stats.accepted_tokens >= 28 && stats.accepted_tokens <= stats.drafted_tokens);
  CHECK_EQ(stats.output_tokens, 40u);
  CHECK_EQ(device->max_tokens_seen, 8u);
  // As many guesses as a graph has rows.
  auto narrow = Make(WithRows({1, 3}), 33, Guessing(7), &device);
  job = Repeating(6, 40);
  CHECK(RunOne(narrow.get(), &job).num_steps > stats.num_steps);
  // No row to spare: as without guesses.
  auto none = Make(WithRows({1}), 33, Guessing(7));
  job = Repeating(6, 40);
  CHECK_EQ(RunOne(none.get(), &job).drafted_tokens, 0u);
}

// The chain of guesses of a step ends with the request: at a stop id, a length, a number that is none.
void Ends() {
  for (uint32_t max_tokens = 1; max_tokens < 24; ++max_tokens) {
    auto engine = Make(WithRows({1, 8}), 33, Guessing(7));
    Job job = Repeating(5, max_tokens);
    RunOne(engine.get(), &job);
    // Every seventh token or so is another one, which stops it now and then.
    job = Repeating(5, 40);
    job.params.temperature = 20;
    job.params.seed = max_tokens;
    for (int32_t t = 20; t < 50; ++t) job.stops.push_back(t);
    RunOne(engine.get(), &job);
  }
  NullDevice* device;
  auto engine = Make(WithRows({1, 8}), 33, Guessing(7), &device);
  Job job = Repeating(5, 40);
  CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  bool more;
  for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&more));
  device->poison = true;
  CHECK_OK(engine->Step(&more));
  Drain(engine.get(), &outputs);
  CHECK_EQ(outputs[std::pair(job.id, 0u)].error, static_cast<int32_t>(LLMC_ERR_NOT_FINITE));
  CHECK_OK(engine->CheckIntegrity());
  device->poison = false;
  // A device that fails: events tell of the tokens that came, not of guesses.
  job = Repeating(5, 40);
  CHECK_OK(Submit(engine.get(), &job));
  for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&more));
  device->fail_after = 1;
  CHECK(!engine->Step(&more).ok());
  Drain(engine.get(), &outputs);
  const Output& failed = outputs[std::pair(job.id, 0u)];
  CHECK_EQ(failed.kind, static_cast<uint32_t>(LLMC_EVENT_FAILED));
  CHECK_EQ(failed.end.num_output_tokens, failed.tokens.size());
  CHECK_OK(engine->CheckIntegrity());
}

// What a later request finds in the prefix cache is what it would find without guesses.
void PrefixCache() {
  uint32_t cached[2] = {};
  for (const bool guesses : {false, true}) {
    EngineOptions options = guesses ? Guessing(7) : EngineOptions{};
    options.keep_states_every = 8;
    auto engine = Make(WithRows({1, 8}), 33, options);
    Job first = Repeating(6, 17);
    Outputs outputs;
    CHECK_OK(Submit(engine.get(), &first));
    RunAll(engine.get(), &outputs);
    Job second = Repeating(6, 4);
    const Output& said = outputs[std::pair(first.id, 0u)];
    second.prompt.insert(second.prompt.end(), said.tokens.begin(), said.tokens.end());
    CHECK_OK(Submit(engine.get(), &second));
    RunAll(engine.get(), &outputs);
    Compare(outputs[{second.id, 0}], Reference(second, 0, 64));
    cached[guesses] = outputs[std::pair(second.id, 0u)].num_cached;
  }
  CHECK(cached[0] > 8 && cached[0] == cached[1]);
}

// A pool without a block to spare: guesses get what is left, and nobody is preempted for them.
void ScarceBlocks() {
  for (uint32_t blocks : {5u, 6u, 8u, 11u}) {
    auto engine = Make(WithRows({1, 2, 4, 8, 16}), blocks, Guessing(7));
    auto plain = Make(WithRows({1, 2, 4, 8, 16}), blocks, {});
    Outputs outputs[2];
    std::vector<Job> jobs = {Repeating(4, 10), Repeating(5, 9)};
    for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
    RunAll(engine.get(), &outputs[0]);
    for (const Job& job : jobs) Compare(outputs[0][{job.id, 0}], Reference(job, 0, std::min(64u, 4 * (blocks - 1))));
    for (Job& job : jobs) CHECK_OK(Submit(plain.get(), &job));
    RunAll(plain.get(), &outputs[1]);
    CHECK(engine->Stats().num_preemptions <= plain->Stats().num_preemptions);
  }
}

// What is not forked yet is not guessed; siblings guess each for itself. Guided requests as far as there are masks.
void OfWhom() {
  auto engine = Make(WithRows({1, 2, 4, 8, 16}), 65, Guessing(3));
  Job job = Repeating(6, 12);
  job.params.n = 3;
  CHECK(RunOne(engine.get(), &job).accepted_tokens > 0);
  auto guided = Make(WithRows({1, 2, 4, 8, 16}), 65, Guessing(3));
  job = Repeating(6, 12);
  job.guided = true;
  CHECK_OK(Submit(guided.get(), &job));
  Outputs outputs;
  Needs needs;
  bool more = true;
  while (more || !needs.empty()) {
    Drain(guided.get(), &outputs, &needs);
    for (const auto& need : needs) SetMask(guided.get(), job.id, need.second, job.prompt, outputs[need].tokens);
    needs.clear();
    CHECK_OK(guided->Step(&more));
    Drain(guided.get(), &outputs, &needs);
  }
  Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
}

// Guesses of the host, whose masks a step draws with; what is wrong of them is forgotten, masks too.
void GuessesOfTheHost() {
  auto engine = Make(WithRows({1, 2, 4, 8, 16}), 65, Guessing(6));
  Job job = Simple(6, 20);
  job.guided = true;
  const Output want = Reference(job, 0, 64);
  CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  Needs needs;
  bool more = true;
  for (uint32_t turn = 0; more || !needs.empty(); ++turn) {
    Drain(engine.get(), &outputs, &needs);
    for (const auto& need : needs) {
      // The tokens that will come, of which every third time the third one is another.
      std::vector<int32_t> text = job.prompt, guesses;
      const std::vector<int32_t>& out = outputs[need].tokens;
      text.insert(text.end(), out.begin(), out.end());
      std::vector<uint32_t> words = MaskOf(text);
      const uint64_t num_words = words.size();
      for (size_t i = out.size(); i < std::min(out.size() + 5, want.tokens.size()); ++i) {
        const bool wrong = turn % 3 == 2 && guesses.size() == 2;
        guesses.push_back(wrong ? (want.tokens[i] + 1) % kVocab : want.tokens[i]);
        text.push_back(guesses.back());
        const std::vector<uint32_t> mask = MaskOf(text);
        words.insert(words.end(), mask.begin(), mask.end());
      }
      CHECK_OK(engine->SetTokenMasks(job.id, 0, words.data(), num_words, guesses.data(), guesses.size()));
    }
    needs.clear();
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
  }
  Compare(outputs[{job.id, 0}], want);
  const llmc_engine_stats stats = engine->Stats();
  CHECK(stats.num_decode_steps <= 7 && stats.accepted_tokens >= 12);
  const uint32_t words[2] = {};
  const int32_t guesses[LLMC_MAX_SPECULATE_TOKENS + 1] = {kVocab};
  CHECK(engine->SetTokenMasks(1, 0, words, 1, guesses, LLMC_MAX_SPECULATE_TOKENS + 1)
            .message.find("num_guesses is 65; use 0 to 64") == 0);
  CHECK(engine->SetTokenMasks(1, 0, words, 1, guesses, 1).message.find("guesses[0] is 53; use 0 to 52") == 0);
  uint64_t count;
  CHECK_EQ(engine->GetGuesses(job.id, 0, nullptr, 0, &count).code, LLMC_ERR_NOT_FOUND);
}

// Decodes that ride along with a prompt's chunks bring guesses, too, within the tokens that a step may have.
void MixedSteps() {
  ModelShape shape = WithRows({1, 2, 4, 8});
  AddGraph(&shape, Phase::kMixed, 12, 8, 16);
  NullDevice* device;
  for (const uint32_t most : {0u, 6u}) {
    EngineOptions options = Guessing(4);
    options.max_tokens_per_step = most;
    options.prefix_cache = false;
    auto engine = Make(shape, 65, options, &device);
    Job first = Repeating(6, 40), second = Simple(5, 5);
    Outputs outputs;
    CHECK_OK(Submit(engine.get(), &first));
    bool more;
    for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&more));
    CHECK_OK(Submit(engine.get(), &second));
    const llmc_engine_stats before = engine->Stats();
    CHECK_OK(engine->Step(&more));
    const llmc_engine_stats after = engine->Stats();
    CHECK_EQ(after.num_mixed_steps, before.num_mixed_steps + 1);
    // Guesses have what a chunk leaves.
    CHECK_EQ(after.drafted_tokens - before.drafted_tokens, most ? 0u : 4u);
    CHECK_EQ(after.scheduled_tokens - before.scheduled_tokens, most ? 6u : 10u);
    RunAll(engine.get(), &outputs);
    for (const Job& job : {first, second}) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
    CHECK(engine->Stats().accepted_tokens > 0);
  }
}

// A draft that says what the model says is right always; one that says something else now and then, less often. Its
// texts are in a KV cache of its own: read once, in pieces, then guess by guess.
void Draft() {
  const ModelShape shape = WithRows({1, 2, 4, 8, 16, 32});
  NullDevice *device, *draft;
  auto engine = MakeDrafted(shape, 65, Guessing(4), OfDraft(shape), 65, 0, &device, &draft);
  Job job = Simple(20, 31);
  const llmc_engine_stats all = RunOne(engine.get(), &job);
  // The first token comes of the prompt; while the draft reads 20 tokens in steps of 16 one more comes without it.
  CHECK_EQ(all.accepted_tokens, all.drafted_tokens);
  CHECK(all.num_decode_steps <= 8);
  CHECK(draft->runs <= 2 + 4 * all.num_decode_steps);
  // Half of its rows are those of another text.
  auto unsure = MakeDrafted(shape, 65, Guessing(4), OfDraft(shape), 65, 50);
  job = Simple(20, 31);
  const llmc_engine_stats some = RunOne(unsure.get(), &job);
  CHECK(some.accepted_tokens > 0 && some.accepted_tokens < some.drafted_tokens);
  CHECK(some.num_decode_steps > all.num_decode_steps);
  // Drawn at random: by the same random numbers.
  auto drawn = MakeDrafted(shape, 65, Guessing(4), OfDraft(shape), 65, 0);
  job = Simple(20, 31);
  job.params.temperature = 0.9f;
  job.params.seed = 5;
  job.params.n = 3;
  job.params.num_logprobs = 2;
  job.params.repetition_penalty = 1.3f;
  const llmc_engine_stats seeded = RunOne(drawn.get(), &job);
  CHECK(seeded.drafted_tokens > 0 && seeded.accepted_tokens == seeded.drafted_tokens);
}

// Texts too long for the draft are not guessed; where its pool is short, sequences take turns in it.
void DraftLimits() {
  const ModelShape shape = WithRows({1, 2, 4, 8, 16, 32});
  ModelShape small = Shape(2, 24, 4);
  AddGraph(&small, Phase::kPrefill, 7, 2, 12);
  for (uint32_t b : {1u, 3u}) AddGraph(&small, Phase::kDecode, b, b, 12);
  auto engine = MakeDrafted(shape, 65, Guessing(3), small, 16, 0);
  std::vector<Job> jobs;
  for (uint32_t i = 0; i < 5; ++i) jobs.push_back(Simple(5 + 3 * i, 30));
  Outputs outputs;
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  RunAll(engine.get(), &outputs);
  for (const Job& job : jobs) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
  const llmc_engine_stats stats = engine->Stats();
  CHECK(stats.drafted_tokens > 0 && stats.accepted_tokens == stats.drafted_tokens);
}

void DraftFails() {
  const ModelShape shape = WithRows({1, 2, 4, 8});
  NullDevice *device, *draft;
  auto engine = MakeDrafted(shape, 65, Guessing(3), OfDraft(shape), 65, 0, &device, &draft);
  // Warm before all that: each graph once, and nothing of it is left.
  uint64_t ns = 0;
  CHECK_OK(engine->WarmDraft(&ns));
  constexpr uint64_t kTimed = 3;  // guesses of one sequence
  CHECK(draft->runs == shape.graphs.size() + kTimed && device->runs == 0 && ns > 0);
  CHECK(Make(shape, 65, Guessing(3))->WarmDraft(&ns).message.find("The engine has no draft") == 0);
  Job job = Simple(10, 30);
  CHECK_OK(Submit(engine.get(), &job));
  bool more;
  for (int i = 0; i < 4; ++i) CHECK_OK(engine->Step(&more));
  draft->fail_after = 2;
  CHECK(!engine->Step(&more).ok());
  CHECK_OK(engine->CheckIntegrity());
  Outputs outputs;
  Drain(engine.get(), &outputs);
  const Output& failed = outputs[std::pair(job.id, 0u)];
  CHECK_EQ(failed.kind, static_cast<uint32_t>(LLMC_EVENT_FAILED));
  CHECK_EQ(failed.end.num_output_tokens, failed.tokens.size());
  job = Simple(10, 30);
  RunOne(engine.get(), &job);
  // Numbers of the draft that are none make no guess.
  draft->poison = true;
  job = Simple(11, 30);
  const uint64_t before = engine->Stats().drafted_tokens;
  RunOne(engine.get(), &job);
  CHECK_EQ(engine->Stats().drafted_tokens, before);

  ModelShape other = OfDraft(shape);
  other.vocab_size = kVocab + 1;
  std::unique_ptr<Engine> none;
  const Status status = Engine::Create(std::make_unique<NullDevice>(shape, 9), Guessing(3), &none,
                                       std::make_unique<NullDevice>(other, 9));
  CHECK(status.message.find("The draft has 54 tokens, the model 53") == 0);
}

// Guesses that were right, beside wrong ones, are computed again for the states behind them.
void Again() {
  const ModelShape shape = WithRows({1, 2, 4, 8, 16});
  NullDevice* device;
  auto engine = MakeDrafted(shape, 65, Guessing(4), OfDraft(shape), 65, 50, &device);
  Job job = Simple(20, 31);
  const llmc_engine_stats stats = RunOne(engine.get(), &job);
  CHECK(stats.accepted_tokens > 0 && stats.accepted_tokens < stats.drafted_tokens);
  const uint64_t once = 20 + 30 + stats.drafted_tokens - stats.accepted_tokens;
  CHECK(recurrent ? stats.scheduled_tokens > once : stats.scheduled_tokens == once);
  CHECK_EQ(stats.num_states, stats.num_free_states + stats.num_kept_states);
  if (!recurrent) return;
  // Where others come, and no graph has rows for all that, they are a chunk of text. Who is preempted then has saved the
  // states of fewer tokens than it has.
  uint64_t loaded = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    EngineOptions options = Guessing(3);
    options.swap_always = true;
    options.swap_bytes = 64 * (shape.kv_block_bytes + shape.state_bytes);
    const bool narrow = seed % 2 == 0;
    auto joined =
        MakeDrafted(narrow ? WithRows({1, 4}) : shape, narrow ? 65 : 20, options, OfDraft(shape), 65, 50, &device);
    std::vector<Job> jobs = {Simple(5, 30), Simple(4, 30), Simple(7, 30), Simple(6, 30)};
    Outputs outputs;
    CHECK_OK(Submit(joined.get(), &jobs[0]));
    bool more;
    for (uint32_t i = 0; i < 3 + seed / 2; ++i) CHECK_OK(joined->Step(&more));
    for (uint32_t i = 1; i < jobs.size(); ++i) CHECK_OK(Submit(joined.get(), &jobs[i]));
    RunAll(joined.get(), &outputs);
    for (const Job& one : jobs) Compare(outputs[{one.id, 0}], Reference(one, 0, 64));
    CHECK_EQ(joined->Stats().num_bucket_misses, 0u);
    loaded += device->states_loaded;
  }
  CHECK(loaded > 0);
  // Without a second slot there are no guesses.
  NullDevice::slots = 1;
  auto tight = MakeDrafted(shape, 65, Guessing(4), OfDraft(shape), 65, 50);
  NullDevice::slots = 0;
  job = Simple(20, 31);
  CHECK_EQ(RunOne(tight.get(), &job).drafted_tokens, 0u);
  std::unique_ptr<Engine> none;
  const Status status = Engine::Create(std::make_unique<NullDevice>(shape, 9), Guessing(3), &none,
                                       std::make_unique<NullDevice>(shape, 9));
  CHECK(status.message.find("Layers of the draft have a state") == 0);
}

// What a repetition suggests goes along where a draft makes no guesses. Steps take far longer than the draft, and rows
// cost little.
void Repetitions() {
  const ModelShape shape = WithRows({1, 2, 4, 8, 16});
  EngineOptions options;
  options.speculate_tokens = 7;
  NullDevice *device, *draft;
  auto engine = MakeDrafted(shape, 129, options, OfDraft(shape), 129, 0, &device, &draft);
  device->step_ns = 1'000'000'000;
  device->row_ns = 1'000'000;
  draft->poison = true;
  for (int i = 0; i < 6; ++i) {
    Job job = Repeating(6 + i, 50);
    RunOne(engine.get(), &job);
  }
  const llmc_engine_stats stats = engine->Stats();
  CHECK(stats.accepted_tokens > 150 && 2 * stats.num_decode_steps < stats.output_tokens);
}

// By what they pay: the clock is that of the machine, so only results can be asked for.
void Measured() {
  EngineOptions options;
  options.speculate_tokens = 5;
  auto engine = Make(WithRows({1, 2, 4, 8, 16}), 65, options);
  for (int i = 0; i < 4; ++i) {
    Job job = Repeating(6 + i, 50);
    RunOne(engine.get(), &job);
  }
  const ModelShape shape = WithRows({1, 2, 4, 8, 16});
  auto drafted = MakeDrafted(shape, 65, options, OfDraft(shape), 65, 20);
  for (int i = 0; i < 4; ++i) {
    Job job = Simple(6 + i, 50);
    RunOne(drafted.get(), &job);
  }
}

}  // namespace

int main() {
  for (recurrent = false;; recurrent = true) {
    FewerSteps();
    Ends();
    PrefixCache();
    ScarceBlocks();
    OfWhom();
    GuessesOfTheHost();
    MixedSteps();
    Draft();
    DraftLimits();
    DraftFails();
    Again();
    Repetitions();
    Measured();
    if (recurrent) break;
  }
  return Finish("speculator_test");
}
