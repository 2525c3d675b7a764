// Weights that move to huge pages while a device replays: addresses, bits, files that cannot be read, memory that is short.
#include "device/cpu/weight_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/memory_limit.h"
#include "device/cpu/cpu_device.h"
#include "engine/engine.h"
#include "support/check.h"
#include "support/device_stat.h"
#include "support/failing_new.h"
#include "support/hand_made_artifact.h"

namespace {

using namespace llmc_test;
using llmc::Status;
using llmc::WeightMode;

constexpr uint64_t kMiB = 1u << 20;
constexpr uint64_t kBiasBytes = 7 * kMiB + 8;
constexpr uint64_t kFewBytes = 2 * kMiB + 8;  // where a test moves them again and again
constexpr int kReplaysBefore = 16;

std::string WeightsPath() { return g_dir + "/weights.safetensors"; }

// In place, so that a mapping shows it.
void WriteInPlace(uint64_t offset, const void* data, size_t bytes) {
  const int fd = ::open(WeightsPath().c_str(), O_WRONLY);
  CHECK(::pwrite(fd, data, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes));
  ::close(fd);
}

void SetTable(float value) { WriteInPlace(64, &value, sizeof(value)); }

std::shared_ptr<const llmc::Artifact> OpenArtifact() {
  std::shared_ptr<const llmc::Artifact> artifact;
  CHECK_OK(llmc::Artifact::Open(g_dir, &artifact));
  return artifact;
}

llmc::CpuDeviceOptions Options(WeightMode mode, uint32_t threads, uint64_t part_bytes) {
  llmc::CpuDeviceOptions options;
  options.num_threads = threads;
  options.pool.blocks = 4;
  options.weights.mode = mode;
  options.weights.min_bytes = 0;
  options.weights.part_bytes = part_bytes;
  return options;
}

std::unique_ptr<llmc::CpuDevice> MakeDevice(WeightMode mode, uint32_t threads, uint64_t part_bytes) {
  std::unique_ptr<llmc::CpuDevice> device;
  CHECK_OK(llmc::CpuDevice::Create(OpenArtifact(), Options(mode, threads, part_bytes), &device));
  return device;
}

// The table's first value, as the graph sees it.
float Replay(llmc::CpuDevice* device) {
  const Batch b;
  const float* logits = nullptr;
  CHECK_OK(device->Replay({0, b.num_tokens, b.num_seqs, b.num_samples, b.stride, b.ids.data(), b.positions.data(),
                           b.slots.data(), b.tables.data(), b.context.data(), b.start.data(), b.sample.data()},
                          &logits));
  CHECK(logits[kVocab] == logits[0] + 1102.0f && logits[1] == 1008.5f);
  return logits[0] - 1008.0f;
}

void ReplayUntilMove(llmc::CpuDevice* device) {
  for (int i = 0; i < kReplaysBefore; ++i) {
    CHECK_OK(device->BeforeStep());
    Replay(device);
  }
  CHECK_EQ(device->copied_weight_bytes(), 0u);
}

void TestMovesWhileReplaying(uint32_t threads) {
  auto device = MakeDevice(WeightMode::kAuto, threads, 80);
  ReplayUntilMove(device.get());
  SetTable(1);
  CHECK_OK(device->BeforeStep());
  CHECK_EQ(device->copied_weight_bytes(), 80u);
  SetTable(2);
  CHECK(Replay(device.get()) == 2);  // the table is there in part, and read from the file
  CHECK_OK(device->BeforeStep());
  CHECK_EQ(device->copied_weight_bytes(), 160u);
  CHECK(Replay(device.get()) == 1);
  CHECK_OK(device->AddGraphs(OpenArtifact()));
  CHECK(Replay(device.get()) == 1);
  for (int i = 0; i < 3; ++i) CHECK_OK(device->BeforeStep());
  CHECK_EQ(device->copied_weight_bytes(), 400u);
  CHECK(Replay(device.get()) == 1);
  SetTable(0);
}

void TestModes() {
  auto mapped = MakeDevice(WeightMode::kMapped, 2, 0), copied = MakeDevice(WeightMode::kCopied, 2, 0);
  CHECK_EQ(mapped->weight_bytes(), 128 + kBiasBytes + kTailBytes);
  CHECK_EQ(copied->copied_weight_bytes(), copied->weight_bytes());
  SetTable(3);
  CHECK(Replay(copied.get()) == 0);
  ReplayUntilMove(mapped.get());
  CHECK_OK(mapped->BeforeStep());
  CHECK(Replay(mapped.get()) == 3);
  SetTable(0);
  // AUTO leaves small weights alone.
  llmc::CpuDeviceOptions options = Options(WeightMode::kAuto, 1, 0);
  options.weights.min_bytes = 128 + kBiasBytes + kTailBytes + 1;
  std::unique_ptr<llmc::CpuDevice> small;
  CHECK_OK(llmc::CpuDevice::Create(OpenArtifact(), options, &small));
  ReplayUntilMove(small.get());
  CHECK_OK(small->BeforeStep());
  CHECK_EQ(small->copied_weight_bytes(), 0u);
}

// Every byte arrives, by many threads and in parts that end anywhere.
void TestBytes() {
  const Bytes file = Read("weights.safetensors");
  for (const uint64_t part : {2 * kMiB, 3 * kMiB + 77, 64 * kMiB}) {
    for (const uint32_t threads : {1u, 3u}) {
      std::unique_ptr<llmc::Team> team;
      llmc::TeamOptions options;
      options.num_threads = threads;
      CHECK_OK(llmc::Team::Create(options, &team));
      const auto artifact = OpenArtifact();
      llmc::WeightMemory weights(artifact, {WeightMode::kCopied, 0, part}, 0);
      llmc::NodeSpread spread;
      int parts = 0;
      for (; !weights.settled(); ++parts) CHECK_OK(weights.Move(team.get(), &spread));
      CHECK_EQ(static_cast<uint64_t>(parts), (file.size() + part - 1) / part);
      CHECK_OK(weights.Move(team.get(), &spread));
      CHECK_EQ(weights.moved_bytes(), file.size());
      const auto* mapped = reinterpret_cast<const char*>(artifact->weight_file().data());
      CHECK(weights.address(0) != mapped + 64 && weights.address(1) != mapped + 128);
      CHECK(std::memcmp(weights.address(1), file.data() + 128, kBiasBytes) == 0);
      CHECK(std::memcmp(mapped, file.data(), file.size()) == 0);  // what was given up can still be read
    }
  }
}

void TestShortMemory() {
  std::unique_ptr<llmc::Team> team;
  CHECK_OK(llmc::Team::Create({}, &team));
  const auto artifact = OpenArtifact();
  for (const uint64_t reserve : {llmc::AvailableMemory(), UINT64_MAX}) {
    llmc::WeightMemory weights(artifact, {WeightMode::kCopied, 0, 0}, reserve);
    llmc::NodeSpread spread;
    CHECK(!weights.settled());
    CHECK_OK(weights.Move(team.get(), &spread));
    CHECK(weights.settled() && weights.moved_bytes() == 0);
    CHECK(weights.address(0) == reinterpret_cast<const char*>(artifact->weight_file().data()) + 64);
  }
}

// A file that was cut off is an error and no signal; once it is whole again the move goes on.
void TestCutFile(uint32_t threads) {
  const Bytes file = Read("weights.safetensors");
  const auto cut = [] { CHECK(::truncate(WeightsPath().c_str(), 3 * kMiB) == 0); };
  const auto mend = [&] { WriteInPlace(3 * kMiB, file.data() + 3 * kMiB, file.size() - 3 * kMiB); };
  auto device = MakeDevice(WeightMode::kAuto, threads, 2 * kMiB);
  ReplayUntilMove(device.get());
  CHECK_OK(device->BeforeStep());
  cut();
  for (int i = 0; i < 2; ++i) {
    const Status status = device->BeforeStep();
    CHECK(status.code == LLMC_ERR_IO && status.message.find("the file ends before it") != std::string::npos);
    CHECK_EQ(device->copied_weight_bytes(), 2 * kMiB);
    CHECK(Replay(device.get()) == 0);
  }
  mend();
  while (device->copied_weight_bytes() < file.size()) CHECK_OK(device->BeforeStep());
  CHECK(Replay(device.get()) == 0);

  const auto artifact = OpenArtifact();
  cut();
  std::unique_ptr<llmc::CpuDevice> copied;
  CHECK(llmc::CpuDevice::Create(artifact, Options(WeightMode::kCopied, threads, 0), &copied).code == LLMC_ERR_IO);
  CHECK(copied == nullptr);
  mend();
  CHECK_OK(artifact->Verify());
}

// Through an engine: a request fails, once, and the next one is served when the file is whole again.
void TestEngineCutFile() {
  const Bytes file = Read("weights.safetensors");
  std::unique_ptr<llmc::Engine> engine;
  CHECK_OK(llmc::Engine::Create(MakeDevice(WeightMode::kAuto, 2, 2 * kMiB), {}, &engine));
  const int32_t prompt[] = {3, 4};
  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof(sampling));
  sampling.temperature = 0;
  sampling.ignore_eos = 1;
  sampling.max_tokens = 40;
  llmc_request request;
  llmc_request_init(&request, sizeof(request));
  request.prompt_token_ids = prompt;
  request.num_prompt_tokens = 2;
  request.sampling = &sampling;
  const auto run = [&](Status* status) {
    uint64_t id = 0;
    CHECK_OK(engine->Submit(request, &id));
    std::vector<int32_t> tokens;
    for (bool more = true; more && status->ok();) {
      *status = engine->Step(&more);
      if (engine->Stats().num_steps == 18) CHECK(::truncate(WeightsPath().c_str(), 3 * kMiB) == 0);
      llmc_event events[4];
      events[0].struct_size = sizeof(llmc_event);
      for (uint64_t i = 0, count = engine->Poll(events, 4); i < count; ++i) {
        if (events[i].kind == LLMC_EVENT_TOKEN) tokens.push_back(events[i].token_id);
        CHECK_EQ(events[i].kind == LLMC_EVENT_FAILED, !status->ok());
      }
    }
    CHECK_OK(engine->CheckIntegrity());
    return tokens;
  };
  Status status;
  CHECK_EQ(run(&status).size(), 18u);
  CHECK_EQ(status.code, LLMC_ERR_IO);
  CHECK_EQ(Stat(*engine, "copied_weight_bytes"), 4 * kMiB);
  Status again;
  CHECK(run(&again).empty());
  CHECK_EQ(again.code, LLMC_ERR_IO);
  WriteInPlace(3 * kMiB, file.data() + 3 * kMiB, file.size() - 3 * kMiB);
  Status whole;
  CHECK(run(&whole) == std::vector<int32_t>(40, kVocab - 1));
  CHECK_OK(whole);
  CHECK_EQ(Stat(*engine, "copied_weight_bytes"), file.size());
  CHECK_EQ(Stat(*engine, "weight_bytes"), file.size());
}

// Each allocation fails once; what fails can be done again.
void TestFailedAllocations() {
  const auto artifact = OpenArtifact();
  int failed = 0;
  std::unique_ptr<llmc::CpuDevice> copied;
  for (bool done = false; !done; ++failed) {
    allocations_left = failed, failures_left = 1;
    try {
      const Status status = llmc::CpuDevice::Create(artifact, Options(WeightMode::kCopied, 1, 2 * kMiB), &copied);
      done = failures_left == 1;  // it makes fewer
      allocations_left = -1;
      CHECK_OK(status);  // planning does without memory
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
  }
  CHECK(failed > 10);
  CHECK_EQ(copied->copied_weight_bytes(), copied->weight_bytes());
  CHECK(Replay(copied.get()) == 0);

  auto device = MakeDevice(WeightMode::kAuto, 2, kMiB);
  ReplayUntilMove(device.get());
  failed = 0;
  while (device->copied_weight_bytes() < device->weight_bytes()) {
    const uint64_t before = device->copied_weight_bytes();
    for (int allocation = 0; device->copied_weight_bytes() == before; ++allocation) {
      allocations_left = allocation, failures_left = 1;
      try {
        const Status status = device->BeforeStep();
        allocations_left = -1;
        CHECK_OK(status);
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
        ++failed;
      }
      CHECK(Replay(device.get()) == 0);
    }
  }
  CHECK(failed > 8);
}

void TestAbi() {
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, nullptr) == LLMC_OK);
  for (const std::string mode : {"auto", "mapped", "copied"}) {
    llmc_device* device = OpenCpu("weights", mode);
    llmc_engine* engine = nullptr;
    llmc_replayer* replayer = nullptr;
    CHECK(llmc_engine_create(device, artifact, nullptr, &engine, nullptr) == LLMC_OK);
    CHECK(llmc_replayer_create(device, artifact, nullptr, &replayer, nullptr) == LLMC_OK);
    llmc_device_close(device);
    llmc_device_stat stats[16];
    stats[0].struct_size = sizeof(stats[0]);
    uint64_t count = 0, weights = 0, copied = 0;
    CHECK(llmc_engine_get_device_stats(engine, stats, 16, &count, nullptr) == LLMC_OK);
    for (uint64_t i = 0; i < count; ++i) {
      if (stats[i].name == std::string("weight_bytes")) weights = stats[i].value;
      if (stats[i].name == std::string("copied_weight_bytes")) copied = stats[i].value;
    }
    CHECK_EQ(weights, 128 + kBiasBytes + kTailBytes);
    CHECK_EQ(copied, mode == "copied" ? weights : 0);
    llmc_engine_destroy(engine);
    llmc_replayer_destroy(replayer);
  }
  llmc_artifact_close(artifact);
}

}  // namespace

int main() {
  MakeArtifact(400 - 128 - kTailBytes);
  for (const uint32_t threads : {1u, 2u, 3u}) TestMovesWhileReplaying(threads);
  RemoveArtifact();
  MakeArtifact(kBiasBytes);
  TestModes();
  TestBytes();
  TestShortMemory();
  for (const uint32_t threads : {1u, 2u}) TestCutFile(threads);
  TestEngineCutFile();
  TestAbi();
  RemoveArtifact();
  MakeArtifact(kFewBytes);
  TestFailedAllocations();
  RemoveArtifact();
  return Finish("weight_memory_test");
}
