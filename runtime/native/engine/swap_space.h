// SwapSpace: places in host memory for KV blocks and states of preempted sequences, and whether swapping pays.
// Independent of devices.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

// Places of one kind. A step reads them back after all its saves, so returned places are free from the next step on.
class SwapPlaces {
 public:
  void Open(uint32_t count) {
    count_ = count;
    given_back_.reserve(count);
    Clear();
  }
  uint32_t count() const { return count_; }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t num_used() const { return count_ - static_cast<uint32_t>(free_.size() + given_back_.size()); }
  uint32_t Take() {
    const uint32_t place = free_.back();
    free_.pop_back();
    return place;
  }
  void GiveBack(std::vector<uint32_t>* places) {
    given_back_.insert(given_back_.end(), places->begin(), places->end());
    places->clear();
  }
  void NextStep() {
    free_.insert(free_.end(), given_back_.begin(), given_back_.end());
    given_back_.clear();
  }
  void Clear() noexcept {
    given_back_.clear();
    free_.resize(count_);
    for (uint32_t i = 0; i < count_; ++i) free_[i] = count_ - 1 - i;
  }

 private:
  uint32_t count_ = 0;
  std::vector<uint32_t> free_, given_back_;
};

// Measured nanoseconds: of moving a block out and back, of moving a sequence's states, and of computing a token.
struct SwapCosts {
  uint64_t block = 0, state = 0, token = 0;
};

class SwapSpace {
 public:
  // state_places: 0 where the model is not recurrent. always: swap whatever it costs.
  void Open(uint32_t block_places, uint32_t state_places, bool always) {
    always_ = always;
    blocks.Open(block_places);
    states.Open(state_places);
  }
  bool open() const { return blocks.count() > 0; }

  void SetCosts(const SwapCosts& costs) { costs_ = costs; }
  // Whether there is room for a sequence with `num_blocks` blocks, and swapping is faster than recomputing its tokens.
  bool Pays(uint32_t num_blocks, bool with_states, uint32_t tokens) const {
    if (num_blocks == 0 || num_blocks > blocks.num_free() || (with_states && states.num_free() == 0)) return false;
    const uint64_t ns = num_blocks * costs_.block + (with_states ? costs_.state : 0);
    return always_ || (costs_.block > 0 && ns < tokens * costs_.token);
  }
  void NextStep() {
    blocks.NextStep();
    states.NextStep();
  }
  void Clear() noexcept {
    blocks.Clear();
    states.Clear();
  }

  SwapPlaces blocks, states;

 private:
  bool always_ = false;
  SwapCosts costs_;
};

}  // namespace llmc
