// The KV pool of hand-made artifacts: layers that are alike and layers that differ, of one stage and of two.
#include "device/cpu/kv_pool.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/gpu/device_memory.h"
#include "device/gpu/graph_memory.h"
#include "support/check.h"
#include "support/hand_made_artifact.h"

namespace {

using namespace llmc_test;
using llmc::Artifact;
using llmc::KvLayerRecord;
using llmc::KvPool;

constexpr uint32_t kBlocks = 5;

// Keys or values of a layer, from block 0 on.
struct Part {
  char* data;
  uint64_t block_bytes;
};

std::vector<Part> PartsOf(const Artifact& artifact, uint32_t stage, const KvPool& pool) {
  const llmc::StageRecord layers = artifact.layers_of(stage);
  std::vector<Part> parts;
  for (uint32_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
    parts.push_back({pool.keys(layer), artifact.key_block_bytes(layer)});
    parts.push_back({pool.values(layer), artifact.value_block_bytes(layer)});
  }
  return parts;
}

// The bytes of a block, part by part.
Bytes BlockOf(const std::vector<Part>& parts, uint32_t block) {
  Bytes bytes;
  for (const Part& part : parts) {
    const char* from = part.data + block * part.block_bytes;
    bytes.insert(bytes.end(), from, from + part.block_bytes);
  }
  return bytes;
}

void TestPool(const Artifact& artifact, uint32_t stage, uint64_t wanted_bytes) {
  KvPool pool;
  CHECK(KvPool::Allocate(artifact, stage, kBlocks, &pool).ok());
  CHECK(pool.num_blocks() == kBlocks);
  const std::vector<Part> parts = PartsOf(artifact, stage, pool);
  // Parts follow each other, each begins at a cache line, and none overlaps the next.
  const char* const begin = pool.pages().data();
  const char* end = begin;
  for (const Part& part : parts) {
    CHECK(part.data == end && reinterpret_cast<uintptr_t>(part.data) % llmc::kAlignment == 0);
    end = part.data + llmc::RoundUp(kBlocks * part.block_bytes, llmc::kAlignment);
  }
  CHECK(end == begin + pool.pages().size());
  CHECK(std::all_of(begin, end, [](char byte) { return byte == 0; }));
  unsigned char next = 1;
  for (const Part& part : parts) {
    for (uint64_t i = 0; i < kBlocks * part.block_bytes; ++i) part.data[i] = static_cast<char>(next++ % 251);
  }
  std::vector<Bytes> blocks;
  for (uint32_t block = 0; block < kBlocks; ++block) blocks.push_back(BlockOf(parts, block));
  CHECK(blocks[0].size() == wanted_bytes);
  pool.Touch(2);
  pool.Touch(kBlocks);
  pool.Touch(1);
  for (uint32_t block = 0; block < kBlocks; ++block) {
    Bytes read(wanted_bytes + 1, 0xa5);
    CHECK(pool.Read(block, read.data()).ok() && read.back() == 0xa5);
    read.pop_back();
    CHECK(read == blocks[block]);
  }
  CHECK(pool.Copy(4, 1).ok() && pool.Copy(2, 2).ok());
  blocks[1] = blocks[4];
  std::reverse(blocks[3].begin(), blocks[3].end());
  CHECK(pool.Write(3, blocks[3].data()).ok());
  for (uint32_t block = 0; block < kBlocks; ++block) CHECK(BlockOf(parts, block) == blocks[block]);
  CHECK(!pool.Copy(0, kBlocks).ok() && !pool.Copy(kBlocks, 0).ok());
  CHECK(!pool.Read(kBlocks, blocks[0].data()).ok() && !pool.Write(kBlocks, blocks[0].data()).ok());
}

// What a GPU has of the same layers: memory for as many blocks, and the parts in the same order.
void TestDeviceMemory(const Artifact& artifact, uint32_t rank) {
  using State = llmc::GraphState<uint64_t>;
  const llmc::DeviceMemory memory = llmc::DeviceMemory::Of(artifact, kBlocks, rank);
  const llmc::StageRecord layers = artifact.layers_of(artifact.stage_of(rank));
  uint64_t all = 0, bytes = 0;
  std::vector<uint64_t> found, wanted;
  const llmc::Status status = State::EachKv(memory, [&](auto member, size_t layer, uint64_t block) {
    found.insert(found.end(), {layer, uint64_t{member == &State::values}, block});
    bytes += block;
    return llmc::Status::Ok();
  });
  for (uint64_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
    const KvLayerRecord of = artifact.kv_layer(static_cast<uint32_t>(layer));
    wanted.insert(wanted.end(), {layer, 0, of.key_block_bytes});
    if (of.value_block_bytes != 0) wanted.insert(wanted.end(), {layer, 1, of.value_block_bytes});
    all += of.key_block_bytes + of.value_block_bytes;
  }
  CHECK(status.ok() && found == wanted && bytes == all && memory.pool == kBlocks * all);
}

void TestArtifact(int uneven_stages, const std::vector<uint64_t>& block_bytes) {
  MakeArtifact(8, 0, uneven_stages);
  std::shared_ptr<const Artifact> artifact;
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  CHECK(artifact->num_stages() == block_bytes.size());
  CHECK(artifact->shape().kv_block_bytes == *std::max_element(block_bytes.begin(), block_bytes.end()));
  for (uint32_t stage = 0; stage < block_bytes.size(); ++stage) {
    TestPool(*artifact, stage, block_bytes[stage]);
    TestDeviceMemory(*artifact, stage);
  }
  RemoveArtifact();
}

// One layer alone is more than can be counted, behind one that is not. A pool stays what it was.
void TestOverflow() {
  std::shared_ptr<const Artifact> artifact;
  KvPool pool;
  Tables tables = MakeArtifact(8, 0, 1);
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  CHECK(KvPool::Allocate(*artifact, 0, kBlocks, &pool).ok());
  const char* pages = pool.pages().data();
  const char* values = pool.values(1);
  for (size_t at : {tables.offset[2] + 80, tables.offset[13] + 16}) Put(&tables.file, at, uint64_t{1} << 51);
  FixCrc(&tables.file);
  Write("graphs.bin", tables.file);
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  for (uint32_t blocks : {1u << 11, 1u << 13, UINT32_MAX}) {
    KvPool unmade;
    for (KvPool* one : {&unmade, &pool}) {
      CHECK_EQ(KvPool::Allocate(*artifact, 0, blocks, one).code, LLMC_ERR_OUT_OF_MEMORY);
    }
    CHECK(unmade.pages().data() == nullptr && unmade.num_blocks() == 0);
    CHECK(pool.pages().data() == pages && pool.num_blocks() == kBlocks && pool.values(1) == values);
  }
  RemoveArtifact();
}

}  // namespace

int main() {
  TestArtifact(0, {(4 + 16) * 16 * 4});
  TestArtifact(1, {256 + 1024 + 512 + 64 + 192});
  TestArtifact(2, {256 + 1024, 512 + 64 + 192});
  TestOverflow();
  return llmc_test::Finish("kv_pool_test");
}
