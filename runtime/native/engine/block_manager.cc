#include "engine/block_manager.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

Status Broken(std::string what, uint64_t block) {
  return Status::Error(LLMC_ERR_INTERNAL, "Block " + std::to_string(block) + ": " + std::move(what) + ".");
}

}  // namespace

BlockManager::BlockManager(uint32_t num_blocks, uint32_t block_size, bool prefix_cache, uint32_t num_states)
    : num_blocks_(std::max(num_blocks, 1u)),
      block_size_(block_size),
      prefix_cache_(prefix_cache),
      ref_(num_blocks_),
      next_free_(num_blocks_),
      prev_free_(num_blocks_),
      states_(num_states, num_blocks_) {
  if (prefix_cache_) {
    uint32_t buckets = 16;
    while (buckets < num_blocks_ && buckets < (1u << 31)) buckets *= 2;
    heads_.resize(buckets);
    next_cached_.resize(num_blocks_);
    tokens_.resize(static_cast<size_t>(num_blocks_) * block_size_);
  }
  id_.resize(num_blocks_);
  parent_id_.resize(num_blocks_);
  Clear();
}

void BlockManager::Clear() noexcept {
  num_free_ = num_cached_ = 0;
  departures_ += num_blocks_;
  for (std::vector<uint32_t>* of : {&ref_, &next_free_, &prev_free_, &heads_, &next_cached_}) {
    std::fill(of->begin(), of->end(), 0);
  }
  std::fill(id_.begin(), id_.end(), 0);
  std::fill(parent_id_.begin(), parent_id_.end(), 0);
  for (uint32_t b = 1; b < num_blocks_; ++b) ListInsertAfter(prev_free_[0], b);
  states_.Clear();
}

void BlockManager::ListInsertAfter(uint32_t at, uint32_t block) {
  uint32_t next = next_free_[at];
  next_free_[at] = block;
  prev_free_[block] = at;
  next_free_[block] = next;
  prev_free_[next] = block;
  ++num_free_;
}

void BlockManager::ListRemove(uint32_t block) {
  next_free_[prev_free_[block]] = next_free_[block];
  prev_free_[next_free_[block]] = prev_free_[block];
  --num_free_;
  ++departures_;
}

uint32_t BlockManager::Allocate() {
  uint32_t block = next_free_[0];
  if (block == 0) return 0;
  ListRemove(block);
  if (id_[block] != 0) Unregister(block);
  ref_[block] = 1;
  return block;
}

void BlockManager::Acquire(uint32_t block) {
  if (ref_[block]++ == 0) ListRemove(block);
}

void BlockManager::Release(uint32_t block) {
  if (--ref_[block] > 0) return;
  if (id_[block] == 0) states_.Drop(block);
  // Blocks without cached contents are reused first; cached ones wait at the back in the order they were freed.
  ListInsertAfter(id_[block] == 0 ? 0 : prev_free_[0], block);
}

uint32_t BlockManager::Bucket(uint64_t parent_id, const int32_t* tokens) const {
  uint64_t hash = Mix(parent_id + 0x9e3779b97f4a7c15ull);
  for (uint32_t i = 0; i < block_size_; ++i) hash = Mix(hash ^ static_cast<uint32_t>(tokens[i])) + i;
  return static_cast<uint32_t>(hash & (heads_.size() - 1));
}

uint32_t BlockManager::Find(uint64_t parent_id, const int32_t* tokens) const {
  for (uint32_t b = heads_[Bucket(parent_id, tokens)]; b != 0; b = next_cached_[b]) {
    if (parent_id_[b] == parent_id &&
        std::memcmp(&tokens_[static_cast<size_t>(b) * block_size_], tokens, block_size_ * sizeof(int32_t)) == 0) {
      return b;
    }
  }
  return 0;
}

void BlockManager::Lookup(uint64_t root, const int32_t* tokens, uint32_t max_blocks, std::vector<uint32_t>* blocks,
                          uint64_t* id) const {
  blocks->clear();
  *id = root;
  if (!prefix_cache_) return;
  for (uint32_t i = 0; i < max_blocks; ++i) {
    uint32_t block = Find(*id, tokens + static_cast<size_t>(i) * block_size_);
    if (block == 0) return;
    blocks->push_back(block);
    *id = id_[block];
  }
}

void BlockManager::CutToState(uint64_t root, std::vector<uint32_t>* blocks, uint64_t* id) const {
  if (!states_.any()) return;
  while (!blocks->empty() && states_.of(blocks->back()) == 0) blocks->pop_back();
  *id = blocks->empty() ? root : id_[blocks->back()];
}

BlockManager::Place BlockManager::Touch(const int32_t* tokens, uint32_t max_blocks) {
  Place place;
  std::vector<uint32_t> chain;
  Lookup(kRoot, tokens, max_blocks, &chain, &place.id);
  for (uint32_t block : chain) Acquire(block);
  uint32_t num_free = 0;
  for (std::size_t i = chain.size(); i-- > 0;) {
    Release(chain[i]);
    num_free += ref_[chain[i]] == 0;
  }
  place.num_blocks = static_cast<uint32_t>(chain.size());
  // Free blocks of the chain are now the last ones of the list.
  place.stands_until = departures_ + (num_free_ - num_free);
  return place;
}

uint64_t BlockManager::Register(uint32_t block, uint64_t parent_id, const int32_t* tokens, bool with_state) {
  if (!prefix_cache_) return kRoot;
  const uint32_t same = id_[block] != 0 ? block : Find(parent_id, tokens);
  if (with_state) {
    states_.Keep(block, same != 0 ? same : block);
  } else if (same != block) {
    states_.Drop(block);  // promised by a step that never ran
  }
  if (same != 0) return id_[same];
  std::memcpy(&tokens_[static_cast<size_t>(block) * block_size_], tokens, block_size_ * sizeof(int32_t));
  id_[block] = next_id_++;
  parent_id_[block] = parent_id;
  uint32_t bucket = Bucket(parent_id, tokens);
  next_cached_[block] = heads_[bucket];
  heads_[bucket] = block;
  ++num_cached_;
  return id_[block];
}

uint32_t BlockManager::ExchangeForCached(uint32_t block, uint64_t parent_id, const int32_t* tokens) {
  if (!prefix_cache_ || id_[block] != 0) return block;
  const uint32_t same = Find(parent_id, tokens);
  if (same == 0) return block;
  Acquire(same);
  Release(block);
  return same;
}

void BlockManager::Unregister(uint32_t block) {
  uint32_t* link = &heads_[Bucket(parent_id_[block], &tokens_[static_cast<size_t>(block) * block_size_])];
  while (*link != block) link = &next_cached_[*link];
  *link = next_cached_[block];
  next_cached_[block] = 0;
  id_[block] = parent_id_[block] = 0;
  states_.Drop(block);
  --num_cached_;
}

void BlockManager::Forget(uint32_t block) {
  if (id_[block] == 0) return;
  Unregister(block);
  departures_ += num_blocks_;
  if (ref_[block] > 0) return;
  ListRemove(block);
  ListInsertAfter(0, block);
}

Status BlockManager::CheckIntegrity(const std::vector<uint32_t>& expected_refs,
                                    const std::vector<uint32_t>& taken) const {
  if (ref_[0] != 0 || id_[0] != 0) return Broken("the dummy block is in use", 0);
  uint32_t zero = 0, cached = 0;
  for (uint32_t b = 1; b < num_blocks_; ++b) {
    if (ref_[b] != expected_refs[b]) {
      return Broken("has " + std::to_string(ref_[b]) + " references but " + std::to_string(expected_refs[b]) +
                        " block table entries",
                    b);
    }
    zero += ref_[b] == 0;
    cached += id_[b] != 0;
    if (id_[b] != 0 && Find(parent_id_[b], &tokens_[static_cast<size_t>(b) * block_size_]) != b) {
      return Broken("is cached but the prefix index does not find it", b);
    }
  }
  uint32_t listed = 0;
  for (uint32_t b = next_free_[0]; b != 0; b = next_free_[b]) {
    if (ref_[b] != 0) return Broken("is in the free list and in use", b);
    if (prev_free_[next_free_[b]] != b) return Broken("has a broken link in the free list", b);
    if (++listed > num_blocks_) return Broken("the free list has a cycle", b);
  }
  if (listed != zero || listed != num_free_) return Broken("the free list misses free blocks", listed);
  uint32_t indexed = 0;
  for (uint32_t head : heads_) {
    for (uint32_t b = head; b != 0; b = next_cached_[b]) {
      if (id_[b] == 0) return Broken("is in the prefix index but not cached", b);
      if (++indexed > num_blocks_) return Broken("the prefix index has a cycle", b);
    }
  }
  if (indexed != cached || cached != num_cached_) return Broken("the prefix index misses cached blocks", indexed);
  return states_.CheckIntegrity(taken);
}

}  // namespace llmc
