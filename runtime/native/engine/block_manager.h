// Paged KV blocks: reference counts, prefix cache and LRU eviction. Independent of devices and sequences.
#pragma once
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "engine/state_slots.h"

namespace llmc {

// Block 0 is the dummy block of padding rows: it is never allocated.
//
// A block is in exactly one state: in use (ref > 0) or free (ref = 0, in the free list). Independently it may be
// cached: then it holds the KV of `block_size` known tokens after a known prefix. Each cached block has an id that is
// never reused, and stores its parent's id. By induction an id names the content of the whole prefix. A lookup compares
// tokens and parent id, so a hash collision or a recycled block can never be mistaken for a hit.
class BlockManager {
 public:
  static constexpr uint64_t kRoot = 0;  // parent id of a sequence's first block

  // The end of a chain of cached blocks from kRoot, which a caller keeps to go on there later. It holds no references:
  // blocks may leave the cache meanwhile. The id names the right content even then.
  struct Place {
    uint32_t num_blocks = 0;
    uint64_t id = kRoot;  // of the last block
    uint64_t stands_until = 0;  // on the clock of departures: until then all blocks of the chain are cached
  };

  // The same for a sequence with an adapter, whose keys and values differ. No block id is that large, and adapter ids
  // are never reused.
  static constexpr uint64_t RootOf(uint64_t adapter) { return uint64_t{1} << 63 | adapter; }

  // num_states: slots of states, with the dummy slot, of a recurrent model; else 0.
  BlockManager(uint32_t num_blocks, uint32_t block_size, bool prefix_cache, uint32_t num_states = 0);

  // Slots of a recurrent model. A cached block may have one, which is given back when the block leaves the cache.
  StateSlots& states() { return states_; }
  const StateSlots& states() const { return states_; }

  uint32_t block_size() const { return block_size_; }
  bool prefix_cache() const { return prefix_cache_; }
  uint32_t num_usable() const { return num_blocks_ - 1; }
  uint32_t num_free() const { return num_free_; }
  uint32_t num_cached() const { return num_cached_; }
  uint32_t ref(uint32_t block) const { return ref_[block]; }

  // Returns a block with one reference, or 0 if none is free. Evicts the least recently used cached block if necessary.
  uint32_t Allocate();
  void Acquire(uint32_t block);
  // Drops one reference. Release a sequence's blocks last to first, so that the front of a prefix is kept longest.
  void Release(uint32_t block);

  // Frees all blocks and empties the cache, from any state.
  void Clear() noexcept;

  // Longest cached chain of full blocks that starts at `root`, at most max_blocks. Acquires nothing.
  // *id becomes the id of the last block found (root when none).
  void Lookup(uint64_t root, const int32_t* tokens, uint32_t max_blocks, std::vector<uint32_t>* blocks,
              uint64_t* id) const;
  // Of a recurrent model: takes away blocks from the end of a chain found by Lookup until the last one has a state. *id
  // becomes that block's id.
  void CutToState(uint64_t root, std::vector<uint32_t>* blocks, uint64_t* id) const;
  // Enters a computed full block into the cache. Returns the id that its children must name as their parent: an
  // existing id if the same content is cached already. with_state: a step has written its promised state, which is kept.
  uint64_t Register(uint32_t block, uint64_t parent_id, const int32_t* tokens, bool with_state = false);

  // The cached block of these contents, to which a reference goes over from `block`, which was computed again; `block`
  // itself if there is none.
  uint32_t ExchangeForCached(uint32_t block, uint64_t parent_id, const int32_t* tokens);

  // Finds the end of a text's cached chain, at most max_blocks, and marks its blocks as used.
  Place Touch(const int32_t* tokens, uint32_t max_blocks);
  // Whether the chain is surely whole: `count` more blocks can be allocated without evicting a block of it.
  bool Stands(const Place& place, uint32_t count = 0) const { return departures_ + count <= place.stands_until; }

  // Removes a block from the cache: lookups no longer find it or its successors. References to it stay valid.
  void Forget(uint32_t block);

  // expected_refs[b]: references that the caller's block tables hold to block b. taken: slots of states of sequences.
  Status CheckIntegrity(const std::vector<uint32_t>& expected_refs, const std::vector<uint32_t>& taken = {}) const;

 private:
  uint32_t Bucket(uint64_t parent_id, const int32_t* tokens) const;
  uint32_t Find(uint64_t parent_id, const int32_t* tokens) const;
  void Unregister(uint32_t block);
  void ListRemove(uint32_t block);
  void ListInsertAfter(uint32_t at, uint32_t block);

  uint32_t num_blocks_, block_size_;
  bool prefix_cache_;
  uint32_t num_free_ = 0, num_cached_ = 0;
  uint64_t next_id_ = 1;
  // Clock of departures: ticks when a block leaves the free list. A free block behind n others is not evicted for n
  // ticks. Where cached blocks vanish in another way, the clock jumps beyond any such n.
  uint64_t departures_ = 1;
  std::vector<uint32_t> ref_;
  // Free list, doubly linked through block 0 as sentinel: front is taken next, back was freed last.
  std::vector<uint32_t> next_free_, prev_free_;
  // Prefix index: heads_[bucket] → chain through next_cached_, 0 ends it.
  std::vector<uint32_t> heads_, next_cached_;
  std::vector<uint64_t> id_, parent_id_;  // id 0: not cached
  std::vector<int32_t> tokens_;  // [num_blocks][block_size] of cached blocks
  StateSlots states_;
};

}  // namespace llmc
