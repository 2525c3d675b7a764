// HiddenStates: the model's hidden states of the last tokens of a text, for a draft head that guesses from them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace llmc {

class HiddenStates {
 public:
  // Older states are dropped: they help a head little.
  static constexpr uint32_t kMost = 1024;

  // Stores rows of `width` floats for positions [position, position + count). Drops what was stored for these and later
  // positions, because guesses may have been wrong or a text is recomputed.
  void Take(uint32_t position, const float* rows, uint32_t count, uint32_t width) {
    if (position < first_ || position > end_) first_ = position;
    width_ = width;
    const uint32_t skipped = count > kMost ? count - kMost : 0;
    for (uint32_t i = skipped; i < count; ++i) {
      const std::size_t place = std::size_t{(position + i) % kMost} * width;
      if (rows_.size() < place + width) rows_.resize(place + width);
      std::copy_n(rows + std::size_t{i} * width, width, rows_.begin() + static_cast<std::ptrdiff_t>(place));
    }
    end_ = position + count;
    first_ = std::max(first_, end_ - std::min(end_, kMost));
  }
  // Positions [first, end) are stored.
  uint32_t first() const { return first_; }
  uint32_t end() const { return end_; }
  const float* row(uint32_t position) const { return rows_.data() + std::size_t{position % kMost} * width_; }

 private:
  uint32_t first_ = 0, end_ = 0, width_ = 0;
  std::vector<float> rows_;  // position p at place p % kMost
};

}  // namespace llmc
