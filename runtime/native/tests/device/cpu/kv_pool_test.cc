// The KV pool of hand-made artifacts: layers that are alike and layers that differ, with keys and values or a
// state, of one stage and of two.
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
using llmc::PoolKind;

constexpr llmc::PoolCounts kCounts = {5, 3};

// Keys or values of a layer, from entry 0 on.
struct Part {
  char* data;
  uint64_t entry_bytes;
  PoolKind kind;
};

std::vector<Part> PartsOf(const Artifact& artifact, uint32_t stage, const KvPool& pool) {
  const llmc::StageRecord layers = artifact.layers_of(stage);
  std::vector<Part> parts;
  for (uint32_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
    const PoolKind kind = llmc::PoolKindOf(artifact, layer);
    parts.push_back({pool.keys(layer), artifact.key_block_bytes(layer), kind});
    parts.push_back({pool.values(layer), artifact.value_block_bytes(layer), kind});
  }
  return parts;
}

// The bytes of a block or a slot, part by part.
Bytes EntryOf(const std::vector<Part>& parts, PoolKind kind, uint32_t entry) {
  Bytes bytes;
  for (const Part& part : parts) {
    const char* from = part.data + entry * part.entry_bytes;
    if (part.kind == kind) bytes.insert(bytes.end(), from, from + part.entry_bytes);
  }
  return bytes;
}

void Copy(KvPool* pool, PoolKind kind, uint32_t from, uint32_t to) {
  for (uint32_t part = 0; part < pool->num_parts(kind); ++part) pool->CopyPart(kind, part, from, to);
}

// Whatever is done to entries of a kind leaves the others alone.
void TestEntries(KvPool* pool, const std::vector<Part>& parts, PoolKind kind, uint64_t wanted_bytes) {
  const PoolKind other = kind == PoolKind::kBlocks ? PoolKind::kStates : PoolKind::kBlocks;
  const uint32_t count = kCounts[kind], last = count - 1;
  std::vector<Bytes> entries, others;
  for (uint32_t entry = 0; entry < count; ++entry) entries.push_back(EntryOf(parts, kind, entry));
  for (uint32_t entry = 0; entry < kCounts[other]; ++entry) others.push_back(EntryOf(parts, other, entry));
  CHECK_EQ(entries[0].size(), wanted_bytes);
  pool->Touch(kind, 2);
  pool->Touch(kind, count);
  pool->Touch(kind, 1);
  for (uint32_t entry = 0; entry < count; ++entry) {
    Bytes read(wanted_bytes + 1, 0xa5);
    CHECK(pool->Read(kind, entry, read.data()).ok() && read.back() == 0xa5);
    read.pop_back();
    CHECK(read == entries[entry]);
  }
  Copy(pool, kind, last, 1);
  entries[1] = entries[last];
  std::reverse(entries[last].begin(), entries[last].end());
  CHECK(pool->Write(kind, last, entries[last].data()).ok());
  for (uint32_t entry = 0; entry < count; ++entry) CHECK(EntryOf(parts, kind, entry) == entries[entry]);
  for (uint32_t entry = 0; entry < kCounts[other]; ++entry) CHECK(EntryOf(parts, other, entry) == others[entry]);
  CHECK(!pool->Read(kind, count, entries[0].data()).ok() && !pool->Write(kind, count, entries[0].data()).ok());
}

// wanted: bytes of a block, and of a slot.
void TestPool(const Artifact& artifact, uint32_t stage, const llmc::OfKinds<uint64_t>& wanted) {
  KvPool pool;
  CHECK(KvPool::Allocate(artifact, stage, kCounts, &pool).ok());
  CHECK(pool.counts().blocks == kCounts.blocks && pool.counts().states == kCounts.states);
  const std::vector<Part> parts = PartsOf(artifact, stage, pool);
  // Parts follow each other, each begins at a cache line, and none overlaps the next.
  const char* const begin = pool.pages().data();
  const char* end = begin;
  for (const Part& part : parts) {
    CHECK(part.data == end && reinterpret_cast<uintptr_t>(part.data) % llmc::kAlignment == 0);
    end = part.data + llmc::RoundUp(kCounts[part.kind] * part.entry_bytes, llmc::kAlignment);
  }
  CHECK(end == begin + pool.pages().size());
  CHECK(std::all_of(begin, end, [](char byte) { return byte == 0; }));
  unsigned char next = 1;
  for (const Part& part : parts) {
    for (uint64_t i = 0; i < kCounts[part.kind] * part.entry_bytes; ++i) part.data[i] = static_cast<char>(next++ % 251);
  }
  for (const PoolKind kind : llmc::kPoolKinds) TestEntries(&pool, parts, kind, wanted[kind]);
}

// What a GPU has of the same layers: memory for as many entries, and the parts in the same order.
void TestDeviceMemory(const Artifact& artifact, uint32_t rank) {
  using State = llmc::GraphState<uint64_t>;
  const llmc::DeviceMemory memory = llmc::DeviceMemory::Of(artifact, kCounts, rank);
  const llmc::StageRecord layers = artifact.layers_of(artifact.stage_of(rank));
  for (const PoolKind kind : llmc::kPoolKinds) {
    uint64_t all = 0, bytes = 0;
    std::vector<uint64_t> found, wanted;
    const llmc::Status status = State::EachPart(memory, kind, [&](auto member, size_t layer, uint64_t entry) {
      found.insert(found.end(), {layer, uint64_t{member == &State::values}, entry});
      bytes += entry;
      return llmc::Status::Ok();
    });
    for (uint64_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
      const auto of_artifact = static_cast<uint32_t>(layer);
      if (llmc::PoolKindOf(artifact, of_artifact) != kind) continue;
      const KvLayerRecord of = artifact.kv_layer(of_artifact);
      wanted.insert(wanted.end(), {layer, 0, of.key_block_bytes});
      if (of.value_block_bytes != 0) wanted.insert(wanted.end(), {layer, 1, of.value_block_bytes});
      all += of.key_block_bytes + of.value_block_bytes;
    }
    CHECK(status.ok() && found == wanted && bytes == all && memory.pools[kind] == kCounts[kind] * all);
  }
}

// bytes: of a block and a slot, by stage.
void TestArtifact(int uneven_stages, const std::vector<llmc::OfKinds<uint64_t>>& bytes, bool states = false) {
  MakeArtifact(8, 0, uneven_stages, states);
  std::shared_ptr<const Artifact> artifact;
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  CHECK(artifact->num_stages() == bytes.size());
  llmc::OfKinds<uint64_t> most;
  for (uint32_t stage = 0; stage < bytes.size(); ++stage) {
    for (const PoolKind kind : llmc::kPoolKinds) most[kind] = std::max(most[kind], bytes[stage][kind]);
    TestPool(*artifact, stage, bytes[stage]);
    TestDeviceMemory(*artifact, stage);
  }
  CHECK(artifact->shape().kv_block_bytes == most.blocks && artifact->shape().state_bytes == most.states);
  RemoveArtifact();
}

// One layer alone is more than can be counted, behind one that is not. A pool stays what it was.
void TestOverflow() {
  std::shared_ptr<const Artifact> artifact;
  KvPool pool;
  Tables tables = MakeArtifact(8, 0, 1);
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  CHECK(KvPool::Allocate(*artifact, 0, kCounts, &pool).ok());
  const char* pages = pool.pages().data();
  const char* values = pool.values(1);
  for (size_t at : {tables.offset[2] + 80, tables.offset[13] + 16}) Put(&tables.file, at, uint64_t{1} << 51);
  FixCrc(&tables.file);
  Write("graphs.bin", tables.file);
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  for (uint32_t blocks : {1u << 11, 1u << 13, UINT32_MAX}) {
    KvPool unmade;
    for (KvPool* one : {&unmade, &pool}) {
      CHECK_EQ(KvPool::Allocate(*artifact, 0, {blocks, 0}, one).code, LLMC_ERR_OUT_OF_MEMORY);
    }
    CHECK(unmade.pages().data() == nullptr && unmade.counts().blocks == 0);
    CHECK(pool.pages().data() == pages && pool.counts().blocks == kCounts.blocks && pool.values(1) == values);
  }
  RemoveArtifact();
}

// More than the address space.
void TestTooMuch() {
  for (const bool states : {false, true}) {
    std::shared_ptr<const Artifact> artifact;
    Tables tables = MakeArtifact(8, 0, 1, states);
    for (size_t at : {tables.offset[2] + 80, tables.offset[13] + 16}) Put(&tables.file, at, uint64_t{1} << 51);
    FixCrc(&tables.file);
    Write("graphs.bin", tables.file);
    CHECK(Artifact::Open(g_dir, &artifact).ok());
    KvPool pool;
    const llmc::Status taken = KvPool::Allocate(*artifact, 0, {1u << 8, states ? 1u << 8 : 0}, &pool);
    CHECK_EQ(taken.code, LLMC_ERR_OUT_OF_MEMORY);
    const std::string end = states ? "lower kv_bytes or num_blocks or num_states" : "lower kv_bytes or num_blocks";
    CHECK(taken.message.find("cannot allocate ") == 0 && taken.message.find(end) == taken.message.size() - end.size());
    RemoveArtifact();
  }
}

void TestCounts() {
  std::shared_ptr<const Artifact> artifact;
  const auto says = [&](const llmc::PoolCounts& counts) { return llmc::CheckPoolCounts(*artifact, counts).message; };
  MakeArtifact(8, 0, 1, true);
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  const auto most = static_cast<uint32_t>(artifact->shape().max_states);
  CHECK(says({2, 2}).empty() && says({2, most}).empty());
  CHECK(says({2, 0}).find("num_states with the dummy slot is 0, outside 2 … ") == 0);
  CHECK(!says({2, 1}).empty() && !says({1, 2}).empty() && !says({2, most + 1}).empty());
  RemoveArtifact();
  MakeArtifact();
  CHECK(Artifact::Open(g_dir, &artifact).ok());
  CHECK(says({2, 0}).empty() && says({2, 3}).find("num_states is 3 and no layer") == 0);
  RemoveArtifact();
  CHECK(llmc::CheckEntry(PoolKind::kStates, 2, 3).ok() && llmc::CheckCopy(PoolKind::kStates, 2, 0, 3).ok());
  CHECK(llmc::CheckEntry(PoolKind::kStates, 3, 3).message.find("slot of states 3 does not exist") == 0);
  CHECK(llmc::CheckCopy(PoolKind::kStates, 1, 3, 3).message.find("cannot copy states of slot 1 to 3") == 0);
  CHECK(!llmc::CheckCopy(PoolKind::kBlocks, 3, 1, 3).ok());
}

}  // namespace

int main() {
  TestArtifact(0, {{(4 + 16) * 16 * 4, 0}});
  TestArtifact(1, {{256 + 1024 + 512 + 64 + 192, 0}});
  TestArtifact(2, {{256 + 1024, 0}, {512 + 64 + 192, 0}});
  TestArtifact(1, {{256 + 1024, 512 + 64 + 192}}, true);
  TestArtifact(2, {{256 + 1024, 0}, {0, 512 + 64 + 192}}, true);
  TestOverflow();
  TestTooMuch();
  TestCounts();
  return llmc_test::Finish("kv_pool_test");
}
