#include "core/crc32.h"

#include <array>
#include <cstring>

namespace llmc {
namespace {

constexpr uint64_t kSlices = 16;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b]: contribution of byte b to the remainder when k more bytes follow it.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t c = byte;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xEDB88320u : 0u);
    tables[0][byte] = c;
  }
  for (uint64_t k = 1; k < kSlices; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t c = tables[k - 1][byte];
      tables[k][byte] = (c >> 8) ^ tables[0][c & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are folded as little endian");

// Contribution of 8 bytes to the remainder when `after` more bytes follow. The look-ups are independent, so that the
// processor overlaps them.
inline uint32_t Fold(uint64_t word, uint64_t after) {
  uint32_t crc = 0;
  for (uint64_t i = 0; i < 8; ++i) crc ^= kTables[after + 7 - i][(word >> (8 * i)) & 0xFF];
  return crc;
}

}  // namespace

uint32_t Crc32(const void* data, uint64_t size, uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint64_t low = 0, high = 0;
    std::memcpy(&low, bytes, 8);
    std::memcpy(&high, bytes + 8, 8);
    crc = Fold(low ^ crc, 8) ^ Fold(high, 0);
  }
  for (; size > 0; --size, ++bytes) crc = kTables[0][(crc ^ *bytes) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

}  // namespace llmc
