// PlacedRows: rows that take the place of tokens of a prompt, such as those of images.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "artifact/model_shape.h"
#include "core/status.h"
#include "llmc/llmc.h"

namespace llmc {

class PlacedRows {
 public:
  using Identity = std::array<uint8_t, 32>;
  // Rows in place of tokens [first, end).
  struct Part {
    uint32_t first, end;
    std::size_t offset;  // index of its first row among those of all parts
    Identity identity;
    int32_t name;  // of RowNames
    int64_t shift;  // of the rotary positions of all that follows
    bool on_axes;
  };

  // Checks and copies the rows of a request. Its parts have no names yet.
  static Status Read(const ModelShape& model, const llmc_request& c, PlacedRows* out);

  bool empty() const { return parts_.empty(); }
  std::vector<Part>& parts() { return parts_; }
  // The row in place of a token; nullptr: the token stands for itself.
  const float* row(uint32_t position) const;
  // Appends rotary positions of a token on kRopeAxes axes.
  void AddRopePositions(uint32_t position, std::vector<int32_t>* out) const;
  // Puts names in place of tokens [0, count).
  void PutNames(uint32_t count, int32_t* tokens) const;

 private:
  // The last part that begins at or before a position; nullptr: none.
  const Part* Before(uint32_t position) const;
  std::size_t row_of(const Part& part, uint32_t position) const { return part.offset + (position - part.first); }

  std::size_t width_ = 0;
  std::vector<Part> parts_;
  std::vector<float> rows_;
  std::vector<int32_t> axes_;  // [row][kRopeAxes] of a model with axes
};

// Numbers that stand for the contents of rows in the prefix cache. None is ever that of two contents.
class RowNames {
 public:
  // Negative, so that no token is equal to it. 0: there are no more.
  int32_t Of(const PlacedRows::Identity& identity);

 private:
  // Beyond that, all are forgotten: known contents then get new numbers, and are computed again.
  static constexpr std::size_t kMost = 1u << 16;

  std::map<PlacedRows::Identity, int32_t> names_;
  int32_t last_ = 0;
};

}  // namespace llmc
