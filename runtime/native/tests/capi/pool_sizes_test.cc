// How many KV blocks and slots of states an engine has.
#include "capi/pool_sizes.h"

#include <string>

#include "core/c_struct.h"
#include "llmc/llmc.h"
#include "support/check.h"

namespace {

using llmc::ModelShape;
using llmc::PoolCounts;
using llmc::PoolOptions;

constexpr uint64_t kGib = 1ull << 30;

// 4 sequences of 160 tokens, 10 blocks each.
ModelShape Model(uint64_t block_bytes, uint64_t state_bytes) {
  ModelShape model{};
  model.block_size = 16;
  model.max_model_len = 150;
  model.max_num_seqs = 4;
  model.kv_block_bytes = block_bytes;
  model.state_bytes = state_bytes;
  return model;
}

void Expect(const ModelShape& model, const PoolOptions& options, uint64_t blocks, uint64_t states) {
  PoolCounts counts;
  const llmc::Status status = PoolSizes(model, options, &counts);
  CHECK(status.ok());
  CHECK_EQ(counts.blocks, blocks);
  CHECK_EQ(counts.states, states);
}

void Refuses(const ModelShape& model, const PoolOptions& options, const std::string& why) {
  PoolCounts counts = {7, 7};
  const llmc::Status status = PoolSizes(model, options, &counts);
  CHECK(status.code == LLMC_ERR_INVALID_ARGUMENT && counts.blocks == 7 && counts.states == 7);
  if (!CHECK(status.message.find(why) != std::string::npos)) std::fprintf(stderr, "%s\n", status.message.c_str());
}

// num_blocks, num_states, kv_bytes, max_num_seqs.
void TestWithoutStates() {
  const ModelShape model = Model(1000, 0);
  Expect(model, {}, 40, 0);
  Expect(model, {0, 0, 0, 9}, 90, 0);
  Expect(Model(kGib / 8, 0), {}, 8, 0);
  Expect(Model(2 * kGib, 0), {}, 1, 0);
  Expect(model, {0, 0, 9999, 0}, 8, 0);
  Expect(model, {5, 0, 9999, 0}, 5, 0);
  Refuses(model, {0, 0, 1999, 0},
          "kv_bytes is 1999 but one KV block takes 1000 bytes and one more is the dummy block; use at least 2000.");
  Refuses(model, {0, 1, 0, 0}, "num_states is 1 but no layer of this model has a state");
  ModelShape narrow = model;
  narrow.max_kv_blocks = 8;
  Expect(narrow, {0, 0, 8000, 0}, 7, 0);
  Refuses(narrow, {0, 0, 9000, 0}, "kv_bytes is 9000; use at most 8000.");
  Refuses(narrow, {8, 0, 0, 0}, "num_blocks is 8; use at most 7.");
  const PoolCounts whole = WithDummies(model, {3, 0});
  CHECK(whole.blocks == 4 && whole.states == 0);
}

void TestWithStates() {
  const ModelShape model = Model(1000, 5000);
  // Three for each sequence, if half of the bytes hold these.
  Expect(model, {}, 40, 12);
  Expect(model, {0, 0, 0, 2}, 20, 6);
  Expect(model, {0, 0, 1'000'000, 0}, 1000 - 13 * 5 - 1, 12);
  Expect(model, {0, 0, 100'000, 0}, 100 - 10 * 5 - 1, 9);
  Expect(model, {0, 0, 39'000, 0}, 39 - 3 * 5 - 1, 2);
  // One at least, and a block.
  Expect(model, {0, 0, 19'000, 0}, 19 - 2 * 5 - 1, 1);
  Expect(model, {0, 0, 12'000, 0}, 1, 1);
  Refuses(model, {0, 0, 11'999, 0},
          "kv_bytes is 11999 but one KV block takes 1000 bytes, the states of a sequence take 5000 bytes, and one more "
          "of each is a dummy; use at least 12000.");
  // Large blocks and small states.
  Expect(Model(1000, 10), {0, 0, 2020, 0}, 1, 1);
  Expect(Model(1000, 10), {0, 0, 2100, 0}, 1, 9);
  // What is given decides.
  Expect(model, {7, 0, 0, 0}, 7, 12);
  Expect(model, {7, 0, 39'000, 0}, 7, 2);
  Expect(model, {7, 0, 1, 0}, 7, 1);
  Expect(model, {0, 3, 39'000, 0}, 39 - 4 * 5 - 1, 3);
  Expect(model, {7, 99, 1, 0}, 7, 99);
  Refuses(
      model, {0, 3, 21'999, 0},
      "the states of 3 sequences take 15000 bytes, and one more of each is a dummy; use at least 22000, or a smaller "
      "num_states.");
  Refuses(model, {0, 1, 11'999, 0},
          "the states of a sequence take 5000 bytes, and one more of each is a dummy; use at "
          "least 12000.");
  // 1 GiB is too few for two of these: there is one of each nevertheless.
  Expect(Model(kGib, kGib), {}, 1, 1);
  const PoolCounts whole = WithDummies(model, {3, 2});
  CHECK(whole.blocks == 4 && whole.states == 3);
}

// A pool that holds a sequence of the longest length, 11 blocks with the dummy, holds it when it is made larger.
void TestLargerPoolsHoldNoLess() {
  for (const uint64_t state_bytes : {400, 999, 1000, 1300, 2000, 3700, 5000, 11'000, 30'000}) {
    for (const uint32_t seqs : {1u, 2u, 4u}) {
      const ModelShape model = Model(1000, state_bytes);
      uint64_t least = 0;
      for (uint32_t bytes = 2000 + 2 * static_cast<uint32_t>(state_bytes); bytes < 120'000; bytes += 10) {
        PoolCounts counts;
        CHECK(PoolSizes(model, {0, 0, bytes, seqs}, &counts).ok());
        const uint64_t taken = (counts.blocks + 1) * 1000 + (counts.states + 1) * state_bytes;
        CHECK(counts.states >= 1 && counts.states <= 3 * seqs && taken <= bytes);
        // One state, or half of the bytes at most.
        CHECK(counts.states == 1 || (counts.states + 1) * state_bytes <= bytes / 2);
        if (least == 0 && counts.blocks >= 10) least = bytes;
        CHECK((counts.blocks >= 10) == (least != 0));
      }
      CHECK(least >= 11'000 + 2 * state_bytes && least < 2 * 11'000 + 2 * state_bytes + 10);
    }
  }
  // Half of 18000 bytes would be for two states and a dummy, and leave 8 blocks.
  Expect(Model(1000, 3000), {0, 0, 17'000, 0}, 10, 1);
  Expect(Model(1000, 3000), {0, 0, 18'000, 0}, 11, 1);
}

void TestLimits() {
  ModelShape model = Model(1000, 5000);
  model.max_states = 4;
  model.max_kv_blocks = 8;
  Expect(model, {0, 0, 1'000'000, 0}, 7, 3);
  Refuses(model, {0, 4, 0, 0}, "num_states is 4; use at most 3.");
  Refuses(model, {8, 0, 0, 0}, "num_blocks is 8; use at most 7.");
}

// Layers with a state alone: blocks take no bytes.
void TestStatesAlone() {
  const ModelShape model = Model(0, 5000);
  Expect(model, {}, 40, 12);
  Expect(model, {0, 0, 10'000, 0}, 40, 1);
  Expect(model, {0, 0, 100'000, 0}, 40, 9);
  Refuses(model, {0, 0, 9999, 0}, "use at least 10000.");
}

void TestTheCFunction() {
  llmc_artifact_info info{};
  info.struct_size = sizeof(info);
  info.block_size = 16, info.max_model_len = 150, info.max_num_seqs = 4;
  info.kv_block_bytes = 1000, info.max_kv_blocks = INT32_MAX, info.state_bytes = 5000, info.max_states = INT32_MAX;
  uint32_t blocks = 0, states = 0;
  CHECK(llmc_artifact_info_get_pool_sizes(&info, nullptr, &blocks, &states, nullptr) == LLMC_OK);
  CHECK(blocks == 40 && states == 12);
  llmc_engine_options options;
  llmc_engine_options_init(&options, sizeof(options));
  CHECK(options.num_states == 0);
  options.kv_bytes = 39'000;
  CHECK(llmc_artifact_info_get_pool_sizes(&info, &options, &blocks, &states, nullptr) == LLMC_OK);
  CHECK(blocks == 23 && states == 2);
  options.kv_bytes = 1;
  CHECK(llmc_artifact_info_get_pool_sizes(&info, &options, &blocks, &states, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_artifact_info_get_pool_sizes(&info, &options, &blocks, nullptr, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_artifact_info_get_pool_sizes(nullptr, &options, &blocks, &states, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(blocks == 23 && states == 2);
}

}  // namespace

int main() {
  TestWithoutStates();
  TestWithStates();
  TestLargerPoolsHoldNoLess();
  TestLimits();
  TestStatesAlone();
  TestTheCFunction();
  return llmc_test::Finish("pool_sizes_test");
}
