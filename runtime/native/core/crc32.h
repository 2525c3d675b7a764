// CRC-32 as zlib computes it (reflected polynomial EDB88320).
#pragma once
#include <cstdint>

namespace llmc {

// The CRC-32 of `size` bytes, going on from `crc`, the value of what came before them (0 at the start).
uint32_t Crc32(const void* data, uint64_t size, uint32_t crc = 0);

}  // namespace llmc
