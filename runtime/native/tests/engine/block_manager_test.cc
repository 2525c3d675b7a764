#include "engine/block_manager.h"

#include <random>

#include "support/check.h"

using llmc::BlockManager;

static void TestAllocate() {
  BlockManager m(4, 2, true);
  CHECK_EQ(m.num_free(), 3u);
  uint32_t a = m.Allocate(), b = m.Allocate(), c = m.Allocate();
  CHECK(a && b && c && a != b && b != c && a != c);
  CHECK_EQ(m.Allocate(), 0u);
  m.Acquire(b);
  m.Release(b);
  CHECK_EQ(m.num_free(), 0u);
  m.Release(b);
  CHECK_EQ(m.num_free(), 1u);
  CHECK_EQ(m.Allocate(), b);
  CHECK_OK(m.CheckIntegrity({0, 1, 1, 1}));
  CHECK(!m.CheckIntegrity({0, 1, 2, 1}).ok());
}

static void TestPrefix() {
  BlockManager m(5, 2, true);
  const int32_t tokens[] = {1, 2, 3, 4, 5, 6};
  uint32_t a = m.Allocate(), b = m.Allocate();
  uint64_t ida = m.Register(a, BlockManager::kRoot, tokens);
  uint64_t idb = m.Register(b, ida, tokens + 2);
  CHECK(ida != idb && ida != 0);
  std::vector<uint32_t> hits;
  uint64_t id;
  m.Lookup(BlockManager::kRoot, tokens, 3, &hits, &id);
  CHECK(hits.size() == 2 && hits[0] == a && hits[1] == b && id == idb);
  m.Lookup(BlockManager::kRoot, tokens, 1, &hits, &id);
  CHECK(hits.size() == 1 && id == ida);
  // The same tokens after another prefix are another block.
  m.Lookup(BlockManager::kRoot, tokens + 2, 1, &hits, &id);
  CHECK(hits.empty());
  // A second copy of the same content answers with the first one's id and is not cached.
  uint32_t c = m.Allocate();
  CHECK_EQ(m.Register(c, BlockManager::kRoot, tokens), ida);
  CHECK_EQ(m.num_cached(), 2u);
  // Whoever has the copy may have the cached block instead; a block that is cached, or alone, stays.
  CHECK(m.ExchangeForCached(a, BlockManager::kRoot, tokens) == a && m.ExchangeForCached(c, ida, tokens + 4) == c);
  CHECK_OK(m.CheckIntegrity({0, 1, 1, 1, 0}));
  CHECK_EQ(m.ExchangeForCached(c, BlockManager::kRoot, tokens), a);
  CHECK_OK(m.CheckIntegrity({0, 2, 1, 0, 0}));
  CHECK_EQ(m.Allocate(), c);
  m.Release(a);
  m.Release(c);
  m.Release(b);
  m.Release(a);
  CHECK_EQ(m.num_free(), 4u);
  // Worthless blocks go first, then the least recently freed: b before a, so that the front of the prefix lives on.
  m.Allocate();
  m.Allocate();
  CHECK_EQ(m.num_cached(), 2u);
  CHECK_EQ(m.Allocate(), b);
  m.Lookup(BlockManager::kRoot, tokens, 2, &hits, &id);
  CHECK(hits.size() == 1 && hits[0] == a);
  // A hit takes the block out of the free list.
  m.Acquire(a);
  CHECK_EQ(m.Allocate(), 0u);
  m.Release(a);
  CHECK_EQ(m.Allocate(), a);
  m.Lookup(BlockManager::kRoot, tokens, 2, &hits, &id);
  CHECK(hits.empty());
}

// A recycled block must not inherit the children of what it held before.
static void TestRecycledParent() {
  BlockManager m(4, 1, true);
  const int32_t x[] = {1, 9}, y[] = {2, 9};
  uint32_t parent = m.Allocate(), child = m.Allocate();
  m.Register(child, m.Register(parent, BlockManager::kRoot, x), x + 1);
  m.Release(parent);
  m.Release(m.Allocate());
  uint32_t p2 = 0;
  while (p2 != parent) p2 = m.Allocate();
  m.Register(p2, BlockManager::kRoot, y);
  std::vector<uint32_t> hits;
  uint64_t id;
  m.Lookup(BlockManager::kRoot, y, 2, &hits, &id);
  CHECK(hits.size() == 1 && hits[0] == p2);
}

// A block in use that is forgotten stays with its holder, and is reused first once it is free.
static void TestForget() {
  BlockManager m(4, 1, true);
  const int32_t x[] = {1, 2};
  uint32_t parent = m.Allocate(), child = m.Allocate();
  m.Register(child, m.Register(parent, BlockManager::kRoot, x), x + 1);
  m.Release(child);
  m.Forget(parent);
  m.Forget(parent);
  std::vector<uint32_t> hits;
  uint64_t id;
  m.Lookup(BlockManager::kRoot, x, 2, &hits, &id);
  CHECK(hits.empty());
  CHECK_EQ(m.num_cached(), 1u);
  CHECK_OK(m.CheckIntegrity({0, parent == 1, parent == 2, parent == 3}));
  m.Release(parent);
  CHECK_EQ(m.Allocate(), parent);
  m.Forget(child);
  CHECK_EQ(m.num_cached(), 0u);
  CHECK_EQ(m.Allocate(), child);
}

static void TestOff() {
  BlockManager m(3, 2, false);
  const int32_t tokens[] = {1, 2};
  uint32_t a = m.Allocate();
  m.Register(a, BlockManager::kRoot, tokens);
  std::vector<uint32_t> hits;
  uint64_t id;
  m.Lookup(BlockManager::kRoot, tokens, 1, &hits, &id);
  CHECK(hits.empty());
  CHECK_EQ(m.num_cached(), 0u);
}

static void TestRandom() {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 rng(seed);
    const uint32_t n = 2 + rng() % 12, bs = 1 + rng() % 3;
    BlockManager m(n, bs, true);
    std::vector<uint32_t> refs(n), held, hits;
    for (int step = 0; step < 200; ++step) {
      std::vector<int32_t> tokens(bs * 3);
      for (auto& t : tokens) t = static_cast<int32_t>(rng() % 2);
      uint64_t id;
      m.Lookup(BlockManager::kRoot, tokens.data(), 3, &hits, &id);
      if (rng() % 2) {
        for (uint32_t b : hits) {
          m.Acquire(b);
          ++refs[b];
          held.push_back(b);
        }
        for (size_t i = hits.size(); i < 3; ++i) {
          uint32_t b = m.Allocate();
          if (!b) break;
          CHECK_EQ(refs[b], 0u);
          refs[b] = 1;
          held.push_back(b);
          id = m.Register(b, id, &tokens[i * bs]);
        }
      } else {
        for (size_t i = rng() % 4; i > 0 && !held.empty(); --i) {
          size_t at = rng() % held.size();
          m.Release(held[at]);
          --refs[held[at]];
          held[at] = held.back();
          held.pop_back();
        }
      }
      CHECK_OK(m.CheckIntegrity(refs));
    }
  }
}

// States of blocks: found as far as they reach, moved to the block that lookups find, gone with the block.
static void TestStates() {
  BlockManager m(6, 2, true, 4);
  const int32_t tokens[] = {1, 2, 3, 4, 5, 6};
  const uint32_t a = m.Allocate(), b = m.Allocate(), c = m.Allocate();
  CHECK(m.states().Promise(a) != 0 && m.states().Promise(c) != 0);
  const uint64_t ida = m.Register(a, BlockManager::kRoot, tokens, true);
  const uint64_t idb = m.Register(b, ida, tokens + 2);
  // Promised by a step that never ran: nobody may find it.
  m.Register(c, idb, tokens + 4);
  CHECK(m.states().of(a) != 0 && m.states().of(c) == 0 && m.states().num_free() == 2);
  std::vector<uint32_t> hits;
  uint64_t id = 0;
  m.Lookup(BlockManager::kRoot, tokens, 3, &hits, &id);
  CHECK_EQ(hits.size(), 3u);
  m.CutToState(BlockManager::kRoot, &hits, &id);
  CHECK(hits.size() == 1 && hits[0] == a && id == ida);
  // Computed again, with a state this time.
  const uint32_t again = m.Allocate();
  const uint32_t slot = m.states().Promise(again);
  CHECK_EQ(m.Register(again, ida, tokens + 2, true), idb);
  CHECK(m.states().of(b) == slot && m.states().of(again) == 0);
  m.Forget(a);
  CHECK_EQ(m.states().of(a), 0u);
  m.Lookup(BlockManager::kRoot, tokens, 3, &hits, &id);
  m.CutToState(BlockManager::kRoot, &hits, &id);
  CHECK(hits.empty() && id == BlockManager::kRoot);
  // A promise ends with its block, and a kept state with what was cached.
  const uint32_t unfinished = m.Allocate();
  CHECK(m.states().Promise(unfinished) != 0);
  for (const uint32_t block : {unfinished, again, c, b, a}) m.Release(block);
  CHECK_EQ(m.states().num_kept(), 1u);
  for (int i = 0; i < 5; ++i) m.Allocate();
  CHECK(m.states().num_kept() == 0 && m.states().num_free() == 3);
}

int main() {
  TestStates();
  TestAllocate();
  TestPrefix();
  TestRecycledParent();
  TestForget();
  TestOff();
  TestRandom();
  return llmc_test::Finish("block_manager_test");
}
