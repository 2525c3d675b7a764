// A hand-made artifact is opened and replayed, then its tables are damaged in thousands of ways.
#include "artifact/artifact.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "device/registry.h"
#include "llmc/llmc.h"
#include "support/check.h"
#include "support/hand_made_artifact.h"

namespace {

using namespace llmc_test;

llmc_status Open(std::string* message = nullptr) {
  llmc_error error{};
  llmc_error_init(&error, sizeof(error));
  llmc_artifact* artifact = nullptr;
  const llmc_status status = llmc_artifact_open(g_dir.c_str(), &artifact, &error);
  CHECK((status == LLMC_OK) == (artifact != nullptr));
  CHECK(status == LLMC_OK || error.message[0] != 0);
  if (message) *message = error.message;
  llmc_artifact_close(artifact);
  return status;
}

// Opens the artifact, and has a device load it.
llmc_status Load(std::string* message) {
  llmc_error error{};
  llmc_error_init(&error, sizeof(error));
  llmc_artifact* artifact = nullptr;
  llmc_status status = llmc_artifact_open(g_dir.c_str(), &artifact, &error);
  llmc_replayer* replayer = nullptr;
  if (status == LLMC_OK) {
    llmc_replayer_options options;
    llmc_replayer_options_init(&options, sizeof(options));
    llmc_device* device = OpenCpu("threads", "1");
    status = llmc_replayer_create(device, artifact, &options, &replayer, &error);
    llmc_device_close(device);
  }
  CHECK((status == LLMC_OK) == (replayer != nullptr));
  CHECK(status == LLMC_OK || error.message[0] != 0);
  *message = error.message;
  llmc_replayer_destroy(replayer);
  llmc_artifact_close(artifact);
  return status;
}

// states: slots of states that a step of two sequences names.
void TestReplay(uint32_t threads, uint64_t kv_block_bytes = (4 + 16) * 16 * 4,
                const std::vector<int32_t>& states = {}) {
  llmc_error error;
  llmc_error_init(&error, sizeof(error));
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, &error) == LLMC_OK);
  llmc_artifact_info info{};
  info.struct_size = sizeof(info);
  CHECK(llmc_artifact_get_info(artifact, &info, &error) == LLMC_OK);
  CHECK(info.num_graphs == 1 && info.num_kernels == 2 && info.num_commands == 2 && info.num_weights == 2);
  CHECK(info.vocab_size == kVocab && info.kv_block_bytes == kv_block_bytes && info.max_arena_bytes == 64);
  CHECK((info.state_bytes == 0) == states.empty() && (info.max_states == 0) == states.empty());
  llmc_graph_info graph{};
  graph.struct_size = 8;  // an older caller: only the fields it knows are written
  graph.batch = 77;
  CHECK(llmc_artifact_get_graph(artifact, 0, &graph, &error) == LLMC_OK);
  CHECK(graph.phase == 0 && graph.batch == 77);
  CHECK(llmc_artifact_get_graph(artifact, 1, &graph, &error) == LLMC_ERR_OUT_OF_RANGE);

  llmc_replayer_options options;
  llmc_replayer_options_init(&options, sizeof(options));
  llmc_device* device = OpenCpu("threads", std::to_string(threads));
  llmc_replayer* replayer = nullptr;
  CHECK(llmc_replayer_create(device, artifact, &options, &replayer, &error) == LLMC_OK);
  llmc_device_close(device);
  llmc_artifact_close(artifact);  // the replayer keeps its own reference

  Batch good;
  good.states = states;
  llmc_batch b = good.View();
  std::vector<float> logits(2 * kVocab, -1.0f);
  for (int repeat = 0; repeat < 20; ++repeat) {
    CHECK(llmc_replayer_set_profiling(replayer, repeat % 2, &error) == LLMC_OK);
    CHECK(llmc_replayer_run(replayer, 0, &b, logits.data(), logits.size(), &error) == LLMC_OK);
    for (int v = 0; v < kVocab; ++v) {
      CHECK(logits[v] == 2.0f * 4 + 0.5f * v + 1000.0f);
      CHECK(logits[kVocab + v] == 2.0f * 5 + 0.5f * v + 100.0f + 2000.0f);
    }
  }
  // A stride that is not the graph's: narrower, then wider.
  Batch other = good;
  other.tables = {1, 2}, other.stride = 1;
  b = other.View();
  CHECK(llmc_replayer_run(replayer, 0, &b, logits.data(), logits.size(), &error) == LLMC_OK);
  CHECK(logits[kVocab] == 2110.0f);
  other.tables = {1, 0, 0, 0, -5, -5, 2, 0, 0, 0, -5, -5}, other.stride = 6;
  b = other.View();
  CHECK(llmc_replayer_run(replayer, 0, &b, logits.data(), logits.size(), &error) == LLMC_OK);
  CHECK(logits[kVocab] == 2110.0f);

  const auto fails = [&](const std::function<void(Batch*)>& damage, llmc_status expected) {
    Batch bad = good;
    damage(&bad);
    const llmc_batch view = bad.View();
    const std::vector<float> before = logits;
    CHECK(llmc_replayer_run(replayer, 0, &view, logits.data(), logits.size(), &error) == expected);
    CHECK(error.code == expected && error.message[0] && logits == before);
  };
  fails([](Batch* x) { x->ids[1] = kVocab; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->ids[0] = -1; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->positions[2] = 1; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->slots[0] = 5 * kBlockSize; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->tables[4] = 5; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->context[0] = 65; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->start = {0, 3, 3}; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->start = {0, 2, 4}; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->start = {0, 1 << 30, 3}; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->sample[1] = 3; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->num_tokens = 5; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->num_seqs = 3; }, LLMC_ERR_OUT_OF_RANGE);
  fails([](Batch* x) { x->stride = 0; }, LLMC_ERR_OUT_OF_RANGE);
  // A model with states needs slots, and another takes none.
  fails([&](Batch* x) { x->states.resize(states.empty() ? 6 : 0); }, LLMC_ERR_INVALID_ARGUMENT);
  if (!states.empty()) {
    fails([](Batch* x) { x->states[3] = 3; }, LLMC_ERR_OUT_OF_RANGE);  // as many slots as sequences, and the dummy slot
    fails([](Batch* x) { x->states[3] = x->states[0]; }, LLMC_ERR_OUT_OF_RANGE);
  }
  CHECK((llmc_replayer_copy_state(replayer, 1, 2, &error) == LLMC_OK) == !states.empty());
  CHECK(llmc_replayer_copy_state(replayer, 1, 3, &error) == LLMC_ERR_OUT_OF_RANGE);
  b = good.View();
  CHECK(llmc_replayer_run(replayer, 1, &b, logits.data(), logits.size(), &error) == LLMC_ERR_OUT_OF_RANGE);
  CHECK(llmc_replayer_run(replayer, 0, &b, logits.data(), 15, &error) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_replayer_run(replayer, 0, nullptr, logits.data(), 16, nullptr) == LLMC_ERR_INVALID_ARGUMENT);

  llmc_replay_stats stats{};
  stats.struct_size = sizeof(stats);
  CHECK(llmc_replayer_get_stats(replayer, &stats, &error) == LLMC_OK);
  CHECK(stats.num_replays == 22 && stats.num_threads == threads && stats.total_ns > 0);
  CHECK(stats.kernel_ns == stats.family_ns[0] + stats.family_ns[2] && stats.kernel_ns <= stats.total_ns);
  llmc_replayer_destroy(replayer);
}

void TestDevice() {
  std::shared_ptr<const llmc::Artifact> artifact;
  CHECK_OK(llmc::Artifact::Open(g_dir, &artifact));
  CHECK(artifact->shape().eos_token_ids == std::vector<int32_t>{7});
  std::unique_ptr<llmc::OpenDevice> opened;
  CHECK_OK(llmc::OpenDeviceOf("cpu", {{"threads", "2"}}, &opened));
  std::unique_ptr<llmc::Device> device;
  CHECK(opened->Load(artifact, {1}, &device).code == LLMC_ERR_INVALID_ARGUMENT);
  CHECK_OK(opened->Load(artifact, {4}, &device));
  artifact.reset();
  opened.reset();
  CHECK(device->num_blocks() == 4 && device->num_host_threads() == 2 && device->model().graphs.size() == 1);
  CHECK(device->CopyBlock(1, 3).ok() && !device->CopyBlock(4, 0).ok() && !device->CopyBlock(0, 4).ok());
  const Batch good;
  llmc::StepBatch step{0,          3,          2, 2, 4, good.ids, good.positions, good.slots, good.tables, good.context,
                       good.start, good.sample};
  const float* logits = nullptr;
  CHECK(device->Run(step, &logits).ok() && logits[0] == 1008.0f && logits[kVocab] == 2110.0f);
  step.num_samples = 0;
  CHECK(device->Run(step, &logits).ok());
  step.block_tables.pop_back();
  CHECK(device->Run(step, &logits).code == LLMC_ERR_INVALID_ARGUMENT);
}

// The engine through the C ABI, by callers that are as old as the library, older and newer.
void TestEngine(uint32_t request_size, uint32_t sampling_size, uint32_t event_size) {
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, nullptr) == LLMC_OK);
  llmc_engine_options options;
  llmc_engine_options_init(&options, sizeof(options));
  llmc_engine* engine = nullptr;
  llmc_device* device = OpenCpu("threads", "1");
  CHECK(llmc_engine_create(device, artifact, &options, &engine, nullptr) == LLMC_OK);
  llmc_device_close(device);
  llmc_artifact_close(artifact);

  alignas(8) unsigned char request_bytes[sizeof(llmc_request) + 64], sampling_bytes[sizeof(llmc_sampling_params) + 64];
  auto* request = reinterpret_cast<llmc_request*>(request_bytes);
  auto* sampling = reinterpret_cast<llmc_sampling_params*>(sampling_bytes);
  llmc_request_init(request, request_size);
  llmc_sampling_params_init(sampling, sampling_size);
  sampling->temperature = 0;
  sampling->max_tokens = 3;
  sampling->ignore_eos = 1;
  const int32_t prompt[] = {3, 4};
  request->prompt_token_ids = prompt;
  request->num_prompt_tokens = 2;
  request->sampling = sampling;
  uint64_t id = 0, count = 0;
  CHECK(llmc_engine_submit(engine, request, &id, nullptr) == LLMC_OK);
  std::vector<int32_t> tokens;
  uint32_t progressed = 1, reason = 0;
  std::vector<unsigned char> events(4 * event_size + 8, 0xAA);
  while (progressed) {
    CHECK(llmc_engine_step(engine, &progressed, nullptr) == LLMC_OK);
    Put(&events, 0, event_size);
    CHECK(llmc_engine_poll(engine, reinterpret_cast<llmc_event*>(events.data()), 4, &count, nullptr) == LLMC_OK);
    for (uint64_t i = 0; i < count; ++i) {
      llmc_event event{};
      std::memcpy(&event, &events[i * event_size], std::min<size_t>(event_size, sizeof(event)));
      CHECK(event.struct_size == event_size && event.request_id == id);
      if (event.kind == LLMC_EVENT_TOKEN) tokens.push_back(event.token_id);
      if (event.kind == LLMC_EVENT_FINISHED) reason = event.finish_reason;
    }
    CHECK(std::count(events.end() - 8, events.end(), 0xAA) == 8);
  }
  CHECK(tokens == std::vector<int32_t>(3, kVocab - 1) && reason == LLMC_FINISH_LENGTH);
  // Without parameters: the defaults.
  request->sampling = nullptr;
  CHECK(llmc_engine_submit(engine, request, &id, nullptr) == LLMC_OK);
  request->struct_size = 4;
  CHECK(llmc_engine_submit(engine, request, &id, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  llmc_engine_destroy(engine);
}

void TestDamage(const Tables& good) {
  const auto fails = [&](size_t at, auto value, llmc_status expected) {
    Bytes bytes = good.file;
    Put(&bytes, at, value);
    FixCrc(&bytes);
    Write("graphs.bin", bytes);
    std::string message;
    const llmc_status status = Load(&message);
    if (status != expected) std::fprintf(stderr, "byte %zu: %d, '%s'\n", at, status, message.c_str());
    CHECK(status == expected);
  };
  const auto corrupt = [&](size_t at, auto value) { fails(at, value, LLMC_ERR_CORRUPT); };
  corrupt(0, 'X');
  fails(8, uint32_t{3}, LLMC_ERR_VERSION);
  fails(8, uint32_t{4}, LLMC_ERR_VERSION);
  fails(8, uint32_t{11}, LLMC_ERR_VERSION);
  fails(8, uint32_t{14}, LLMC_ERR_VERSION);
  corrupt(8, uint32_t{6});  // no section of adapters
  corrupt(8, uint32_t{7});
  corrupt(8, uint32_t{8});
  corrupt(8, uint32_t{10});
  corrupt(8, uint32_t{12});
  corrupt(8, uint32_t{13});
  corrupt(12, uint32_t{72});
  corrupt(16, uint64_t{good.file.size() + 1});
  corrupt(24, uint32_t{6});  // a section is missing
  corrupt(24, uint32_t{0xFFFFFFFF});
  corrupt(32, uint64_t{64});  // size of weights.safetensors
  corrupt(40, uint32_t{0});  // checksum of its header
  corrupt(64, uint32_t{2});  // two models
  corrupt(68, uint32_t{2});  // record size
  corrupt(72, ~uint64_t{7});  // offset
  corrupt(80, ~uint64_t{0});  // count
  const size_t model = good.offset[2], kernel = good.offset[3], weight = good.offset[4], graph = good.offset[5];
  const size_t command = good.offset[6], operand = good.offset[7];
  corrupt(model, int32_t{0});
  corrupt(model + 12, int32_t{24});  // block_size
  corrupt(model + 16, int32_t{5});  // kv_dtype
  corrupt(model + 40, int32_t{9});  // num_eos
  corrupt(model + 80, uint64_t{0});  // bytes of keys
  corrupt(model + 88, ~uint64_t{0});  // bytes of values
  const size_t target = good.offset[8], code = good.offset[9];
  fails(target + 24, uint32_t{0}, LLMC_OK);  // any CPU of the architecture
  fails(target + 24, uint32_t{99}, LLMC_ERR_UNSUPPORTED_TARGET);
  fails(target, uint32_t{34}, LLMC_ERR_UNSUPPORTED_TARGET);  // for a device of kind 'til'
  corrupt(target + 4, uint32_t{0});
  corrupt(target + 8, uint32_t{50});
  corrupt(target + 20, uint32_t{99});
  corrupt(code + 4, uint32_t{99});
  fails(code + 4, uint32_t{9}, LLMC_ERR_NOT_FOUND);  // there is no 'kernels.s'
  corrupt(code, uint32_t{5});  // a NUL in it
  corrupt(code + 8, uint32_t{0});
  corrupt(code + 16, uint64_t{64});
  corrupt(kernel + 16, uint32_t{1});  // code file 1 of 1
  corrupt(kernel, uint32_t{18});
  corrupt(kernel + 4, uint32_t{4});  // no NUL after the symbol
  corrupt(kernel + 8, uint32_t{13});
  corrupt(kernel + 12, uint32_t{8});
  corrupt(weight + 4, uint32_t{99});
  corrupt(weight + 8, uint32_t{6});
  corrupt(weight + 12, uint32_t{5});
  corrupt(weight + 16, uint64_t{128});
  corrupt(weight + 16, uint64_t{65});
  corrupt(weight + 16, uint64_t{0});  // inside the header
  corrupt(weight + 80 + 16, uint64_t{64});  // where the first one lies
  corrupt(weight + 32, int64_t{1} << 62);
  corrupt(weight + 68, uint32_t{99});  // layout
  for (size_t field = 0; field < 10; ++field) {
    if (field != 8) corrupt(graph + 4 * field, uint32_t{0xFFFFFFFF});
  }
  corrupt(graph + 32, uint32_t{1});  // first_command + num_commands
  corrupt(graph + 40, uint64_t{0});  // arena too small for the operands
  corrupt(command, uint32_t{2});
  corrupt(command + 4, uint32_t{9});
  corrupt(command + 8, uint32_t{1});
  corrupt(command + 12, uint32_t{2});
  corrupt(command + 16, int32_t{1});
  corrupt(command + 16, int32_t{-2});
  corrupt(operand, uint32_t{6});
  corrupt(operand + 4, uint32_t{8});
  corrupt(operand + 8, uint64_t{4});
  corrupt(operand + 8, ~uint64_t{63});
  corrupt(operand + 16, uint64_t{65});
  corrupt(operand + 16, uint64_t{17});  // one byte more than the ids
  corrupt(operand + 16, uint64_t{0});
  corrupt(operand + 24 + 16, uint64_t{65});
  corrupt(operand + 3 * 24 + 16, uint64_t{kVocab * 4 + 1});
  corrupt(operand + 4 * 24 + 16, uint64_t{9});
  corrupt(operand + 6 * 24 + 16, uint64_t{33});
  for (size_t pool : {7, 8}) {  // another stride between blocks
    corrupt(operand + pool * 24 + 16, uint64_t{0});
    corrupt(operand + pool * 24 + 16, uint64_t{128});
    corrupt(operand + pool * 24 + 16, uint64_t{2048});
    corrupt(operand + pool * 24 + 8, uint64_t{64});
  }
  corrupt(operand + 9 * 24 + 16, uint64_t{2 * kVocab * 4 + 1});
  corrupt(kernel + 24, uint32_t{3});  // weight parts
  corrupt(good.offset[1], 'X');  // a symbol that kernels.so lacks
  Write("graphs.bin", good.file);
}

llmc_status Verify(std::string* message = nullptr) {
  llmc_error error{};
  llmc_error_init(&error, sizeof(error));
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, &error) == LLMC_OK);
  const llmc_status status = llmc_artifact_verify(artifact, &error);
  if (message) *message = error.message;
  llmc_artifact_close(artifact);
  return status;
}

// A value in the tables whose refusal says `what`.
template <class Value>
void CheckCorrupt(const Tables& good, size_t at, Value value, const char* what) {
  Bytes bytes = good.file;
  Put(&bytes, at, value);
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  std::string message;
  const bool said = Open(&message) == LLMC_ERR_CORRUPT && message.find(what) != std::string::npos;
  if (!said) std::fprintf(stderr, "byte %zu: '%s', not '%s'\n", at, message.c_str(), what);
  CHECK(said);
}

// The tables of an artifact for two ranks, which has two collectives.
void TestDamagedRanks(const Tables& good) {
  std::string message;
  const auto corrupt = [&](size_t at, auto value, const char* what) { CheckCorrupt(good, at, value, what); };
  const size_t model = good.offset[2] + 112, weight = good.offset[4], command = good.offset[6];
  const size_t operand = good.offset[7], collective = good.offset[11];
  corrupt(8, uint32_t{6}, "section of collectives, which version 6 has not");
  corrupt(model, int32_t{0}, "num_shared_weights is 1");
  corrupt(model, int32_t{1}, "num_ranks is 1");
  corrupt(model, int32_t{257}, "num_ranks is 257");
  corrupt(model, int32_t{3}, "2 weights are not as many for each of 3 ranks");
  corrupt(model + 4, int32_t{-1}, "num_shared_weights is -1");
  corrupt(model + 4, int32_t{4}, "num_shared_weights is 4 of 3");
  corrupt(weight + 2 * 80 + 8, uint32_t{5}, "weight 'bias' is not like that of rank 0");
  corrupt(collective, uint32_t{2}, "unknown op 2");
  corrupt(collective + 4, uint32_t{2}, "unknown rows 2");
  corrupt(collective + 8, uint32_t{0}, "rows of 0");
  corrupt(collective + 12, uint32_t{4}, "adds 4");
  corrupt(collective + 12, uint32_t{1}, "its collective takes 3");
  corrupt(collective + 8, uint32_t{2}, "operands of other kinds or sizes");
  corrupt(collective + 32 + 8, uint32_t{15}, "rows of 15 for 2 ranks");
  corrupt(collective + 32 + 12, uint32_t{2}, "adds 2");
  corrupt(command + 24, uint32_t{llmc::kCollective + 2}, "names collective 2 of 2");
  corrupt(command + 24 + 12, uint32_t{0}, "has no barrier");
  corrupt(operand + 3 * 24 + 4, uint32_t{2}, "has index 2 of 2");  // the weight of rank 1
  corrupt(operand + 10 * 24, uint32_t{2}, "operands of other kinds");
  Write("graphs.bin", good.file);
  CHECK(Open(&message) == LLMC_OK && Verify(&message) == LLMC_OK);
  std::shared_ptr<const llmc::Artifact> artifact;
  CHECK(llmc::Artifact::Open(g_dir, &artifact).ok());
  CHECK(artifact->num_ranks() == 2 && artifact->num_named_weights() == 2);
  CHECK(artifact->weight_of(0, 1) == 0 && artifact->weight_of(1, 0) == 1 && artifact->weight_of(1, 1) == 2);
  CHECK(artifact->collective(artifact->commands()[0]) == nullptr);
  CHECK(artifact->collective(artifact->commands()[3]) == &artifact->collectives()[1]);
}

// Layers of the KV cache that differ in the sizes of their KV blocks.
void TestDamagedKvLayers(const Tables& good) {
  std::string message;
  const auto corrupt = [&](size_t at, auto value, const char* what) { CheckCorrupt(good, at, value, what); };
  const size_t model = good.offset[2], operand = good.offset[7], layers = good.offset[13];
  const size_t section = 64 + 12 * 24;
  corrupt(8, uint32_t{9}, "section of kv_layers, which version 9 has not");
  corrupt(section, uint32_t{99}, "no section of kv_layers");
  corrupt(section + 4, uint32_t{8}, "records of section kv_layers have 8 bytes");
  corrupt(section + 16, uint64_t{2}, "KV blocks of 2 layers of 3");
  corrupt(section + 16, uint64_t{4}, "outside the file's");
  corrupt(model, int32_t{4}, "KV blocks of 3 layers of 4");
  corrupt(model + 80, uint64_t{513}, "up to 512 bytes of keys and 1024 of values, and the model's have 513 and 1024");
  corrupt(model + 88, uint64_t{2048}, "the model's have 512 and 2048");
  corrupt(layers + 16, uint64_t{0}, "layer 1 has 0 bytes of keys");
  corrupt(layers + 16, ~uint64_t{0}, "bytes of keys and 1024 of values");
  corrupt(layers + 2 * 16 + 8, uint64_t{1025}, "512 bytes of keys and 1025 of values");
  corrupt(layers, uint64_t{320}, "KV blocks of 256 bytes and those of layer 0 have 320");
  corrupt(operand + 7 * 24 + 4, uint32_t{1}, "KV blocks of 256 bytes and those of layer 1 have 512");
  corrupt(operand + 8 * 24 + 4, uint32_t{2}, "KV blocks of 1024 bytes and those of layer 2 have 0");
  corrupt(operand + 8 * 24 + 4, uint32_t{3}, "has index 3 of 3");
  Write("graphs.bin", good.file);
  std::shared_ptr<const llmc::Artifact> artifact, other;
  CHECK(llmc::Artifact::Open(g_dir, &artifact).ok() && artifact->CheckExtends(*artifact).ok());
  for (uint32_t layer = 0; layer < 3; ++layer) {
    CHECK(artifact->key_block_bytes(layer) == kUnevenLayers[layer].key_block_bytes);
    CHECK(artifact->value_block_bytes(layer) == kUnevenLayers[layer].value_block_bytes);
  }
  // Layers of other sizes, though the largest and all operands are the same.
  Bytes bytes = good.file;
  Put(&bytes, layers + 2 * 16, uint64_t{256});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(llmc::Artifact::Open(g_dir, &other).ok() && other->shape().kv_block_bytes == 2048 + 64);
  CHECK(other->KvIdentity() != artifact->KvIdentity());
  const llmc::Status extends = other->CheckExtends(*artifact);
  CHECK(!extends.ok() && extends.message.find("other layers of the KV cache") != std::string::npos);
  Write("graphs.bin", good.file);
  CHECK(Open(&message) == LLMC_OK);
}

// Layers of the KV cache that have a state.
void TestDamagedStateLayers(const Tables& good) {
  std::string message;
  const auto corrupt = [&](size_t at, auto value, const char* what) { CheckCorrupt(good, at, value, what); };
  const size_t layers = good.offset[14], section = 64 + 13 * 24;
  corrupt(8, uint32_t{10}, "section of state_layers, which version 10 has not");
  corrupt(section, uint32_t{99}, "no section of state_layers");
  corrupt(section + 4, uint32_t{4}, "records of section state_layers have 4 bytes");
  corrupt(section + 16, uint64_t{4}, "outside the file's");
  corrupt(layers + 8, uint32_t{3}, "layer 3 of 3 has a state");
  corrupt(layers + 8, ~uint32_t{0}, "layer 4294967295 of 3 has a state");
  corrupt(layers + 8, uint32_t{1}, "layers with a state do not ascend at layer 1");
  corrupt(layers + 8, uint32_t{0}, "layers with a state do not ascend at layer 0");
  Write("graphs.bin", good.file);
  std::shared_ptr<const llmc::Artifact> artifact, other;
  CHECK(llmc::Artifact::Open(g_dir, &artifact).ok() && artifact->CheckExtends(*artifact).ok());
  CHECK(!artifact->has_state(0) && artifact->has_state(1) && artifact->has_state(2) && !artifact->has_state(3));
  const llmc::ModelShape& shape = artifact->shape();
  CHECK(shape.recurrent() && shape.state_bytes == 512 + 64 + 192 && shape.kv_block_bytes == 256 + 1024);
  CHECK(shape.max_states == INT32_MAX / (512 / 4) && shape.max_kv_blocks == INT32_MAX / (16 * 16));
  // A slot is three numbers for each of two sequences. Only this artifact has the input.
  CHECK(artifact->has_input(llmc::kStateSlots) && !artifact->has_input(llmc::kAdapterTiles));
  CHECK(llmc::InputTouchedBytes(artifact->graphs()[0], llmc::kStateSlots) == 2 * 3 * 4);
  const size_t ids = good.offset[7];
  corrupt(ids + 4, uint32_t{llmc::kAdapterTiles}, "has index 8 of 8");
  corrupt(ids + 4, uint32_t{llmc::kRopePositions}, "has index 10 of 10");
  corrupt(ids + 4, uint32_t{llmc::kNumInputs}, "has index 11 of 11");
  Bytes bytes = good.file;
  Put(&bytes, layers, uint32_t{0});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(llmc::Artifact::Open(g_dir, &other).ok() && other->KvIdentity() != artifact->KvIdentity());
  const llmc::Status extends = other->CheckExtends(*artifact);
  CHECK(!extends.ok() && extends.message.find("other layers with a state") != std::string::npos);
  // None of them.
  bytes = good.file;
  Put(&bytes, section + 16, uint64_t{0});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(llmc::Artifact::Open(g_dir, &other).ok() && !other->shape().recurrent() && other->shape().state_bytes == 0);
  CHECK(other->shape().kv_block_bytes == 256 + 1024 + 512 + 64 + 192 && !other->has_input(llmc::kStateSlots));
  Put(&bytes, good.offset[7] + 4, uint32_t{llmc::kStateSlots});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(Open(&message) == LLMC_ERR_CORRUPT && message.find("has index 9 of 9") != std::string::npos);
  // All of them: there are no blocks.
  bytes = good.file;
  Put(&bytes, section + 16, uint64_t{1});
  Put(&bytes, layers, uint32_t{0});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(llmc::Artifact::Open(g_dir, &other).ok() && other->shape().state_bytes == 256 + 1024);
  // States in KV blocks.
  bytes = good.file;
  Put(&bytes, 8, uint32_t{11});
  FixCrc(&bytes);
  Write("graphs.bin", bytes);
  CHECK(Open(&message) == LLMC_ERR_VERSION);
  CHECK(message.find("format version 11, of an older llmc that kept the states") != std::string::npos);
  Write("graphs.bin", good.file);
  CHECK(Open(&message) == LLMC_OK);
}

// A new file: the loader must never see a library change that it has mapped.
void Replace(const std::string& name, const Bytes& bytes) {
  CHECK(::unlink((g_dir + "/" + name).c_str()) == 0);
  Write(name, bytes);
}

// A flipped bit in every byte of the tables and the weights, and in every 37th of the code.
void TestFlips() {
  CHECK(llmc_artifact_verify(nullptr, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(Verify() == LLMC_OK);
  const Bytes weights = Read("weights.safetensors"), code = Read("kernels.so"), tables = Read("graphs.bin");
  std::string message;
  for (size_t at = 0; at < weights.size(); ++at) {
    Bytes bytes = weights;
    bytes[at] ^= static_cast<unsigned char>(1u << at % 8);
    Replace("weights.safetensors", bytes);
    if (at < 64) {
      CHECK(Open() == LLMC_ERR_CORRUPT);
      continue;
    }
    CHECK(Verify(&message) == LLMC_ERR_CORRUPT);
    const char* expected = at < 96    ? "weight 'table' at byte 64"
                           : at < 128 ? "padding from byte 96 to 128"
                           : at < 136 ? "weight 'bias' at byte 128"
                                      : "padding from byte 136 to 192";
    CHECK(message.find(expected) != std::string::npos);
  }
  Bytes both = weights;
  both[70] ^= 1, both[130] ^= 1;
  Replace("weights.safetensors", both);
  CHECK(Verify(&message) == LLMC_ERR_CORRUPT && message.find("'table'") != std::string::npos);
  CHECK(message.find(", and 1 more;") != std::string::npos);
  Replace("weights.safetensors", weights);
  for (size_t at = 0; at < code.size(); at += 37) {
    Bytes bytes = code;
    bytes[at] ^= static_cast<unsigned char>(1u << at % 8);
    Replace("kernels.so", bytes);
    CHECK(Open() == LLMC_ERR_CORRUPT);
  }
  Replace("kernels.so", code);
  for (size_t at = 0; at < tables.size(); ++at) {
    Bytes bytes = tables;
    bytes[at] ^= static_cast<unsigned char>(1u << at % 8);
    Write("graphs.bin", bytes);
    CHECK(Open() == (at / 4 == 2 ? LLMC_ERR_VERSION : LLMC_ERR_CORRUPT));
  }
  Write("graphs.bin", tables);
  CHECK(Verify() == LLMC_OK);
  // Cut while it is open: an error, where reading the mapping would be a signal.
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, nullptr) == LLMC_OK);
  CHECK(::truncate((g_dir + "/weights.safetensors").c_str(), 70) == 0);
  CHECK(llmc_artifact_verify(artifact, nullptr) == LLMC_ERR_IO);
  llmc_artifact_close(artifact);
  Replace("weights.safetensors", weights);
}

void TestOtherFiles() {
  const Bytes weights = Read("weights.safetensors"), code = Read("kernels.so");
  Write("weights.safetensors", Bytes(weights.begin(), weights.end() - 1));
  CHECK(Open() == LLMC_ERR_CORRUPT);
  Write("weights.safetensors", {});
  CHECK(Open() == LLMC_ERR_CORRUPT);
  Write("weights.safetensors", weights);
  CHECK(Open() == LLMC_OK);
  for (size_t keep : {size_t{0}, size_t{10}, size_t{100}, code.size() / 2, code.size() - 1}) {
    Replace("kernels.so", Bytes(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(keep)));
    CHECK(Open() == LLMC_ERR_CORRUPT);
  }
  CHECK(::unlink((g_dir + "/kernels.so").c_str()) == 0);
  CHECK(Open() == LLMC_ERR_NOT_FOUND);
  Write("kernels.so", code);
  CHECK(Open() == LLMC_OK);
  const Bytes tables = Read("graphs.bin");
  const std::string path = g_dir + "/graphs.bin";
  CHECK(::unlink(path.c_str()) == 0 && ::mkfifo(path.c_str(), 0600) == 0);
  ::alarm(20);  // nobody ever writes to it
  CHECK(Open() == LLMC_ERR_IO);
  ::alarm(0);
  CHECK(::unlink(path.c_str()) == 0);
  Write("graphs.bin", tables);
  CHECK(Open() == LLMC_OK);
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open((g_dir + "/missing").c_str(), &artifact, nullptr) == LLMC_ERR_NOT_FOUND);
  CHECK(llmc_artifact_open((g_dir + "/graphs.bin").c_str(), &artifact, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_artifact_open(nullptr, &artifact, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
}

// States go in and out and from slot to slot, also where threads share the copy, and KV blocks stay what they are.
void TestStatesOfADevice(const Tables& good) {
  for (const uint64_t key_bytes : {uint64_t{512}, uint64_t{6} << 20}) {
    Bytes bytes = good.file;
    for (size_t at : {good.offset[2] + 80, good.offset[13] + 16}) Put(&bytes, at, key_bytes);
    FixCrc(&bytes);
    Write("graphs.bin", bytes);
    std::shared_ptr<const llmc::Artifact> artifact;
    CHECK_OK(llmc::Artifact::Open(g_dir, &artifact));
    const uint64_t state_bytes = artifact->shape().state_bytes, block_bytes = artifact->shape().kv_block_bytes;
    CHECK_EQ(state_bytes, key_bytes + 64 + 192);
    for (const char* threads : {"1", "3"}) {
      std::unique_ptr<llmc::OpenDevice> opened;
      std::unique_ptr<llmc::Device> device;
      CHECK_OK(llmc::OpenDeviceOf("cpu", {{"threads", threads}}, &opened));
      CHECK(opened->Load(artifact, {4}, &device).code == LLMC_ERR_INVALID_ARGUMENT);
      CHECK_OK(opened->Load(artifact, {4, 3}, &device));
      CHECK(device->num_blocks() == 4 && device->num_states() == 3);
      std::vector<Bytes> states;
      Bytes block(block_bytes, 0x5a), read(block_bytes);
      for (uint32_t slot = 0; slot < 3; ++slot) {
        states.emplace_back(state_bytes);
        for (uint64_t i = 0; i < state_bytes; ++i)
          states[slot][i] = static_cast<unsigned char>((i + 1) * 7 * (slot + 1));
        CHECK_OK(device->WriteBlock(slot, block.data()));
        CHECK_OK(device->WriteState(slot, states[slot].data()));
      }
      CHECK_OK(device->CopyState(1, 2));
      CHECK_OK(device->CopyState(0, 0));
      states[2] = states[1];
      CHECK(!device->CopyState(1, 3).ok() && !device->CopyState(3, 1).ok());
      for (uint32_t slot = 0; slot < 3; ++slot) {
        Bytes state(state_bytes + 1, 0xa5);
        CHECK_OK(device->ReadState(slot, state.data()));
        CHECK(state.back() == 0xa5 && std::equal(states[slot].begin(), states[slot].end(), state.begin()));
        CHECK_OK(device->ReadBlock(slot, read.data()));
        CHECK(read == block);
      }
      CHECK(!device->ReadState(3, states[0].data()).ok() && !device->WriteState(3, states[0].data()).ok());
    }
  }
  Write("graphs.bin", good.file);
}

void Fuzz(const Tables& good, int rounds) {
  std::mt19937 random(7);
  const uint32_t extremes[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF8, 64};
  int opened = 0, refused = 0;
  for (int round = 0; round < rounds; ++round) {
    Bytes bytes = good.file;
    const uint32_t changes = 1 + random() % 3;
    for (uint32_t i = 0; i < changes; ++i) {
      const size_t at = random() % bytes.size();
      if (random() % 2) {
        bytes[at] ^= static_cast<unsigned char>(1u << random() % 8);
      } else {
        const size_t word = std::min(at / 4 * 4, bytes.size() - 4);
        Put(&bytes, word, extremes[random() % 7]);
      }
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    if (random() % 4 != 0) {
      if (bytes.size() >= 24) Put(&bytes, 16, uint64_t{bytes.size()});
      FixCrc(&bytes);
    }
    Write("graphs.bin", bytes);
    llmc_artifact* artifact = nullptr;
    if (llmc_artifact_open(g_dir.c_str(), &artifact, nullptr) == LLMC_OK) {
      ++opened;
      // What opens can also be made into a device, or is refused for its size.
      std::unique_ptr<llmc::CpuDevice> device;
      llmc::CpuDeviceOptions options;
      options.num_threads = 1;
      options.pool = {4, artifact->artifact->shape().recurrent() ? 3u : 0u};
      options.weights.mode = llmc::WeightMode::kCopied;
      (void)llmc::CpuDevice::Create(artifact->artifact, options, &device);
      llmc_artifact_close(artifact);
    } else {
      ++refused;
    }
  }
  CHECK(refused > rounds / 2 && opened > 0);
  Write("graphs.bin", good.file);
  CHECK(Open() == LLMC_OK);
}

}  // namespace

int main() {
  const Tables good = MakeArtifact();

  for (uint32_t threads : {1u, 2u, 3u, 9u, 16u}) TestReplay(threads);
  TestDevice();
  TestEngine(sizeof(llmc_request), sizeof(llmc_sampling_params), sizeof(llmc_event));
  TestEngine(offsetof(llmc_request, guided), offsetof(llmc_sampling_params, seed), offsetof(llmc_event, error_code));
  TestEngine(sizeof(llmc_request) + 64, sizeof(llmc_sampling_params) + 64, sizeof(llmc_event) + 24);
  TestDamage(good);
  TestFlips();
  TestOtherFiles();
  Fuzz(good, 6000);
  RemoveArtifact();
  const Tables ranked = MakeArtifact(128, 2);
  TestDamagedRanks(ranked);
  Fuzz(ranked, 3000);
  RemoveArtifact();
  const Tables uneven = MakeArtifact(8, 0, 1);
  TestReplay(2, 2048);
  TestDamagedKvLayers(uneven);
  Fuzz(uneven, 3000);
  RemoveArtifact();
  const Tables stateful = MakeArtifact(8, 0, 1, true);
  TestReplay(2, 256 + 1024, {2, 0, 0, 1, 0, 0});
  TestStatesOfADevice(stateful);
  TestDamagedStateLayers(stateful);
  Fuzz(stateful, 3000);
  RemoveArtifact();
  return llmc_test::Finish("artifact_test");
}
