#include "device/adapters.h"

#include <algorithm>
#include <cstring>

#include "artifact/artifact.h"

namespace llmc {
namespace {

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Rounds to nearest, ties to even. NaN stays NaN.
uint16_t RoundToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The same for binary16. Values that round beyond 65504 become infinite.
uint16_t RoundToF16(float value) {
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // adding 0.5 leaves the rounded subnormal in the lowest bits of the sum
    float small;
    std::memcpy(&small, &magnitude, sizeof(small));
    return static_cast<uint16_t>(sign | (BitsOf(small + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

// Rows of `width` floats in tiles: [ceil(rows / tile_rows)][ceil(width / tile_columns)][tile_rows][tile_columns],
// padding zero.
template <class Item, class Round>
void PackMatrix(const float* from, uint64_t rows, uint64_t width, uint64_t tile_rows, uint64_t tile_columns,
                Round round, char* out) {
  Item* to = reinterpret_cast<Item*>(out);
  for (uint64_t first = 0; first < rows; first += tile_rows) {
    for (uint64_t word = 0; word < width; word += tile_columns) {
      for (uint64_t row = first; row < first + tile_rows; ++row) {
        for (uint64_t column = word; column < word + tile_columns; ++column) {
          *to++ = row < rows && column < width ? round(from[row * width + column]) : Item{0};
        }
      }
    }
  }
}

void PackMatrix(const AdapterSlot& slot, const float* from, uint64_t rows, uint64_t width, char* out) {
  const auto as_is = [](float value) { return value; };
  switch (slot.dtype) {
    case 0: return PackMatrix<float>(from, rows, width, slot.tile_rows, slot.tile_columns, as_is, out);
    case 1: return PackMatrix<uint16_t>(from, rows, width, slot.tile_rows, slot.tile_columns, RoundToBf16, out);
    default: return PackMatrix<uint16_t>(from, rows, width, slot.tile_rows, slot.tile_columns, RoundToF16, out);
  }
}

}  // namespace

void PackAdapter(const AdapterSlot& slot, uint32_t linear, const std::vector<AdapterMatrix>& matrices, char* out) {
  std::memset(out, 0, AdapterSlot::kHeaderBytes);  // rank 0: no adapter
  for (const AdapterMatrix& m : matrices) {
    if (m.linear != linear) continue;
    const int32_t rank = static_cast<int32_t>(m.rank);
    std::memcpy(out + 8 * m.part, &rank, sizeof(rank));
    std::memcpy(out + 8 * m.part + sizeof(rank), &m.scale, sizeof(m.scale));
    PackMatrix(slot, m.a, m.rank, slot.columns, out + slot.a_offset(m.part));
    PackMatrix(slot, m.b, slot.rows[m.part], m.rank, out + slot.b_offset(m.part));
  }
}

void AdapterTiler::Write(const BatchView& b, int32_t* out) {
  out[0] = 0;
  if (b.adapter_slots == nullptr) return;
  order_.clear();
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    if (b.adapter_slots[i] != kNoAdapter) order_.push_back(i);
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [&b](uint32_t x, uint32_t y) { return b.adapter_slots[x] < b.adapter_slots[y]; });
  int32_t* tile = nullptr;
  for (const uint32_t seq : order_) {
    const int32_t slot = b.adapter_slots[seq];
    for (int32_t row = b.query_start[seq]; row < b.query_start[seq + 1]; ++row) {
      if (tile == nullptr || tile[0] != slot || tile[1] == static_cast<int32_t>(kTileRows)) {
        tile = out + 1 + static_cast<size_t>(out[0]++) * kTileRecord;
        tile[0] = slot;
        tile[1] = 0;
      }
      // The last row fills the rest of the tile: kernels compute several rows at a time.
      std::fill(tile + 2 + tile[1]++, tile + kTileRecord, row);
    }
  }
}

}  // namespace llmc
