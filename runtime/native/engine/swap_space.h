// SwapSpace: places in host memory for KV blocks of preempted sequences, and whether swapping pays. Independent of
// devices.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

class SwapSpace {
 public:
  // always: swap whatever it costs.
  void Open(uint32_t num_places, bool always) {
    always_ = always;
    free_.resize(num_places);
    given_back_.reserve(num_places);
    for (uint32_t i = 0; i < num_places; ++i) free_[i] = num_places - 1 - i;
    num_places_ = num_places;
  }
  bool open() const { return num_places_ > 0; }
  uint32_t num_used() const { return num_places_ - static_cast<uint32_t>(free_.size() + given_back_.size()); }

  // Measured costs in nanoseconds: of moving a block out and back, and of computing a token.
  void SetCosts(uint64_t block_ns, uint64_t token_ns) { block_ns_ = block_ns, token_ns_ = token_ns; }
  // Whether there is room for `blocks` blocks, and swapping them is faster than recomputing their tokens.
  bool Pays(uint32_t blocks, uint32_t tokens) const {
    if (blocks == 0 || blocks > free_.size()) return false;
    return always_ || (block_ns_ > 0 && blocks * block_ns_ < tokens * token_ns_);
  }
  uint32_t Take() {
    const uint32_t place = free_.back();
    free_.pop_back();
    return place;
  }
  // A step reads back blocks after all its saves, so returned places are free from the next step on.
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
    free_.resize(num_places_);
    for (uint32_t i = 0; i < num_places_; ++i) free_[i] = num_places_ - 1 - i;
  }

 private:
  bool always_ = false;
  uint32_t num_places_ = 0;
  uint64_t block_ns_ = 0, token_ns_ = 0;
  std::vector<uint32_t> free_, given_back_;
};

}  // namespace llmc
