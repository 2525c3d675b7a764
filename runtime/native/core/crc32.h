// CRC-32 as zlib computes it (reflected polynomial EDB88320).
#pragma once
#include <cstdint>

namespace llmc {

// CRC-32 of `size` bytes, continuing from `crc`, the value of the preceding bytes (0 at the start).
uint32_t Crc32(const void* data, uint64_t size, uint32_t crc = 0);

}  // namespace llmc
