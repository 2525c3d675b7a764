// Shared by the checks of an artifact: range tests and numbers in messages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmc {

// offset + bytes <= limit, without overflow.
inline bool InRange(uint64_t offset, uint64_t bytes, uint64_t limit) {
  return offset <= limit && bytes <= limit - offset;
}

inline std::string Str(uint64_t value) { return std::to_string(value); }
inline std::string Str(int32_t value) { return std::to_string(value); }
inline std::string Str(uint32_t value) { return std::to_string(value); }

// As in CRC-32 listings: 8 digits.
inline std::string Hex(uint32_t value) {
  std::string text(8, '0');
  for (std::size_t i = 8; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

}  // namespace llmc
