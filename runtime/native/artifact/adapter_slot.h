// Layout of a LoRA adapter's matrices in a slot of a linear layer's pool (FORMAT.md).
#pragma once
#include <array>
#include <cstdint>

namespace llmc {

constexpr uint32_t kMaxAdapterParts = 8;

// Slot of a layer with `columns` inputs and `rows` outputs per part, for adapter ranks up to `rank`.
struct AdapterSlot {
  static constexpr uint64_t kHeaderBytes = 8 * kMaxAdapterParts;
  static constexpr uint64_t kLine = 64;

  uint32_t columns = 0, tile_rows = 1, tile_columns = 1, num_parts = 0;
  std::array<uint32_t, kMaxAdapterParts> rows{};
  uint32_t rank = 0;
  uint32_t dtype = 0;  // code of FORMAT.md: f32, bf16 or f16

  static uint64_t Up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
  uint64_t item_bytes() const { return dtype == 0 ? 4 : 2; }
  // Bytes reserved for A of one part, and for B of a part.
  uint64_t a_bytes() const { return Up(Up(rank, tile_rows) * Up(columns, tile_columns) * item_bytes(), kLine); }
  uint64_t b_bytes(uint32_t part) const {
    return Up(Up(rows[part], tile_rows) * Up(rank, tile_columns) * item_bytes(), kLine);
  }
  // Byte offsets of A and B in a slot.
  uint64_t a_offset(uint32_t part) const { return kHeaderBytes + part * a_bytes(); }
  uint64_t b_offset(uint32_t part) const {
    uint64_t at = a_offset(num_parts);
    for (uint32_t before = 0; before < part; ++before) at += b_bytes(before);
    return at;
  }
  uint64_t bytes() const { return b_offset(num_parts); }
};

}  // namespace llmc
