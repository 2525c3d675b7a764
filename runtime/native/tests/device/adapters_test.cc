// How adapters are packed, and how rows are given to tiles.
#include "device/adapters.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "artifact/artifact.h"
#include "support/check.h"

using namespace llmc;

namespace {

AdapterSlot Slot(uint32_t dtype, uint32_t tile_rows, uint32_t tile_columns) {
  AdapterSlot slot;
  slot.columns = 3, slot.tile_rows = tile_rows, slot.tile_columns = tile_columns, slot.num_parts = 2;
  slot.rows[0] = 2, slot.rows[1] = 5;
  slot.rank = 4, slot.dtype = dtype;
  return slot;
}

template <class Item>
std::vector<Item> Items(const std::vector<char>& data, uint64_t offset, size_t count) {
  std::vector<Item> items(count);
  std::memcpy(items.data(), data.data() + offset, count * sizeof(Item));
  return items;
}

void TestSizes() {
  const AdapterSlot slot = Slot(1, 16, 2);
  CHECK_EQ(slot.a_bytes(), 16u * 4 * 2);
  CHECK_EQ(slot.b_bytes(1), 16u * 4 * 2);
  CHECK_EQ(slot.a_offset(1), 64u + 128);
  CHECK_EQ(slot.b_offset(0), 64u + 256);
  CHECK_EQ(slot.bytes(), 64u + 4 * 128);
}

// Panels of 2 rows and 2 tile_columns: A of rank 3 is [2][2][2][2], B of 5 rows [3][2][2][2].
void TestPanels() {
  const AdapterSlot slot = Slot(0, 2, 2);
  std::vector<float> a(9), b(15);
  std::iota(a.begin(), a.end(), 1.0f);
  std::iota(b.begin(), b.end(), 101.0f);
  std::vector<char> data(slot.bytes(), 7);
  PackAdapter(slot, 4, {{3, 0, 3, 9.0f, a.data(), b.data()}, {4, 1, 3, 0.5f, a.data(), b.data()}}, data.data());
  CHECK((Items<int32_t>(data, 0, 1)[0] == 0));  // of the other layer
  CHECK((Items<int32_t>(data, 8, 1)[0] == 3));
  CHECK((Items<float>(data, 12, 1)[0] == 0.5f));
  const std::vector<float> of_a = {1, 2, 4, 5, 3, 0, 6, 0, 7, 8, 0, 0, 9, 0, 0, 0};
  CHECK((Items<float>(data, slot.a_offset(1), of_a.size()) == of_a));
  const std::vector<float> of_b = {101, 102, 104, 105, 103, 0,   106, 0, 107, 108, 110, 111,
                                   109, 0,   112, 0,   113, 114, 0,   0, 115, 0,   0,   0};
  CHECK((Items<float>(data, slot.b_offset(1), of_b.size()) == of_b));
  // An adapter that says nothing of the layer empties it.
  PackAdapter(slot, 5, {}, data.data());
  CHECK((Items<int32_t>(data, 8, 1)[0] == 0));
}

void TestRounding() {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> a = {1.00390625f, 1.01171875f, -inf,         65520.0f, 5.9604645e-8f,
                                1e-9f,       -0.0f,       0.333333343f, 2.0f};
  const std::vector<float> b(3 * 2);
  for (const uint32_t dtype : {1u, 2u}) {
    const AdapterSlot slot = Slot(dtype, 1, 1);
    std::vector<char> data(slot.bytes());
    PackAdapter(slot, 0, {{0, 0, 3, 1.0f, a.data(), b.data()}}, data.data());
    const std::vector<uint16_t> bf16 = {0x3f80, 0x3f82, 0xff80, 0x4780, 0x3380, 0x3089, 0x8000, 0x3eab, 0x4000};
    const std::vector<uint16_t> f16 = {0x3c04, 0x3c0c, 0xfc00, 0x7c00, 0x0001, 0x0000, 0x8000, 0x3555, 0x4000};
    CHECK((Items<uint16_t>(data, slot.a_offset(0), a.size()) == (dtype == 1 ? bf16 : f16)));
  }
}

void TestTiles() {
  const std::vector<int32_t> starts = {0, 1, 11, 12, 14, 15}, slots = {2, 0, kNoAdapter, 2, 0};
  BatchView batch{};
  batch.num_seqs = 5;
  batch.num_tokens = 15;
  batch.query_start = starts.data();
  std::vector<int32_t> out(1 + kTileRecord * 15, 99);
  AdapterTiler tiler;
  tiler.Write(batch, out.data());
  CHECK_EQ(out[0], 0);
  batch.adapter_slots = slots.data();
  tiler.Write(batch, out.data());
  const std::vector<int32_t> expected = {3, 0, 8, 1,  2,  3,  4,  5,  6,  7,  8,                // slot 0, rows 1 …
                                         0, 3, 9, 10, 14, 14, 14, 14, 14, 14,  // … and 14
                                         2, 3, 0, 12, 13, 13, 13, 13, 13, 13};
  CHECK((std::vector<int32_t>(out.begin(), out.begin() + 31) == expected));
  CHECK_EQ(out[31], 99);
}

}  // namespace

int main() {
  TestSizes();
  TestPanels();
  TestRounding();
  TestTiles();
  return llmc_test::Finish("adapters_test");
}
