// Crc32 against the bit-by-bit definition, at every length and alignment around the slices, whole and in pieces.
#include "core/crc32.h"

#include <random>
#include <vector>

#include "support/check.h"

namespace {

uint32_t Reference(const unsigned char* data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int k = 0; k < 8; ++k) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

}  // namespace

int main() {
  CHECK_EQ(llmc::Crc32("123456789", 9), 0xCBF43926u);  // the check value of the CRC catalogues
  CHECK_EQ(llmc::Crc32(nullptr, 0), 0u);
  std::mt19937 random(1);
  std::vector<unsigned char> bytes(200);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (size_t start = 0; start < 17; ++start) {
    for (size_t size = 0; size + start <= bytes.size(); ++size) {
      const unsigned char* data = bytes.data() + start;
      const uint32_t expected = Reference(data, size);
      CHECK_EQ(llmc::Crc32(data, size), expected);
      const size_t cut = size ? random() % size : 0;
      CHECK_EQ(llmc::Crc32(data + cut, size - cut, llmc::Crc32(data, cut)), expected);
    }
  }
  return llmc_test::Finish("crc32_test");
}
