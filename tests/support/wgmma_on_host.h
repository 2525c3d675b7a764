// Hopper's products of warp groups as C++ of the host, as the PTX manual describes them: fragments of `wgmma` with the
// first operand in registers, matrix descriptors, and who sees which writes when. Products come when they are waited for,
// and what an item stored comes to them at its proxy fence: each as late as it may. Mistakes end the process.
#pragma once
#include "cuda_on_host.h"

namespace cuda_on_host {

// Products that an item has asked for and not waited for.
struct Products {
  struct One {
    unsigned a[4];
    std::function<void(size_t number)> multiply;
  };
  std::vector<One> asked;
  size_t ended = 0;  // those in groups that were committed
  bool fenced = false;  // since other instructions may have used the registers
  uint64_t count = 0;  // all that the item ever asked for
};
inline Products g_asked[kMostItems];

// What an item stored and the asynchronous proxy does not see yet.
struct Written {
  unsigned char* to;
  unsigned char row[16];
};
inline std::vector<Written> g_written[kMostItems];

// Shared memory has 18 bits of addresses. Here it begins below the first address that a kernel takes of its own.
constexpr uintptr_t kSharedBytes = 1 << 18, kBefore = 1 << 12;
inline uintptr_t g_shared_begin = 0;
inline unsigned char* OfShared(uint64_t address) { return reinterpret_cast<unsigned char*>(g_shared_begin + address); }

// All items of a warp group give the same descriptors. The first one to come leaves its own.
constexpr size_t kRemembered = 1 << 12;
struct Remembered {
  uint64_t number, descriptor;
};
inline Remembered g_descriptors[kRemembered];
inline void CheckSame(uint64_t number, uint64_t descriptor) {
  Remembered& known = g_descriptors[number % kRemembered];
  if (known.number != number) known = {number, descriptor};
  if (known.descriptor != descriptor) Refuse("items of a warp group give one product different descriptors");
}

// The second operand of a product: rows of 32 bytes along K, 8 by 8 and in two columns of 16 bytes.
struct Rows {
  uint64_t first, along, below;
  explicit Rows(uint64_t descriptor)
      : first((descriptor & 0x3fff) << 4),
        along((descriptor >> 16 & 0x3fff) << 4),
        below((descriptor >> 32 & 0x3fff) << 4) {
    // Without swizzle, and so without a base offset. Other bits are reserved.
    if ((descriptor & ~(0x3fffULL | 0x3fffULL << 16 | 0x3fffULL << 32)) != 0) {
      Refuse("a descriptor has bits of a swizzle, of a base offset, or reserved ones");
    }
  }
  unsigned Word(unsigned row, unsigned word) const {
    unsigned found = 0;
    std::memcpy(&found, OfShared(first + row / 8 * below + word / 4 * along + row % 8 * 16 + word % 4 * 4), 4);
    return found;
  }
};

// A warp has 16 of the 64 rows, as it has those of m16n8k16: lane 4r + t has rows r and r + 8 of the result, and columns
// 2t and 2t + 1 of each 8.
template <unsigned columns, class C, class Add>
void Ask(C* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint64_t descriptor, Add add) {
  const unsigned item = g_item.x, lane = item % kWarp, warp = item - lane;
  Products& own = g_asked[item];
  if (!own.fenced) Refuse("a product is asked for without a fence since the last wait");
  CheckSame(++own.count, descriptor);
  const auto multiply = [=](size_t number) {
    const Rows rows(descriptor);
    for (unsigned half = 0; half < 2; ++half) {
      unsigned a[8];
      for (unsigned word = 0; word < 8; ++word) {
        a[word] = g_asked[warp + lane / 4 * 4 + word % 4].asked[number].a[half + 2 * (word / 4)];
      }
      for (unsigned column = 0; column < columns; ++column) {
        if (column % 8 / 2 != lane % 4) continue;
        C& sum = c[column / 8 * 4 + 2 * half + column % 2];
        // In order of K; hardware may have another order within one product.
        for (unsigned word = 0; word < 8; ++word) sum = add(sum, a[word], rows.Word(column, word));
      }
    }
  };
  own.asked.push_back({{a0, a1, a2, a3}, multiply});
}

}  // namespace cuda_on_host

template <int columns>
void llmc_wgmma_of_bf16(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint64_t descriptor) {
  using namespace cuda_on_host;
  Ask<columns>(c, a0, a1, a2, a3, descriptor, [](float sum, unsigned a, unsigned b) {
    sum = std::fma(OfBf16(a & 0xffff), OfBf16(b & 0xffff), sum);
    return std::fma(OfBf16(a >> 16), OfBf16(b >> 16), sum);
  });
}
template <int columns>
void llmc_wgmma_of_f16(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint64_t descriptor) {
  using namespace cuda_on_host;
  Ask<columns>(c, a0, a1, a2, a3, descriptor, [](float sum, unsigned a, unsigned b) {
    sum = std::fma(OfF16(a & 0xffff), OfF16(b & 0xffff), sum);
    return std::fma(OfF16(a >> 16), OfF16(b >> 16), sum);
  });
}
template <int columns>
void llmc_wgmma_of_i8(int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint64_t descriptor) {
  cuda_on_host::Ask<columns>(c, a0, a1, a2, a3, descriptor, [](int sum, unsigned a, unsigned b) {
    for (int i = 0; i < 32; i += 8) sum += static_cast<uint8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return sum;
  });
}
template <int count, class Sum>
void llmc_products_begin(Sum*) {
  cuda_on_host::g_asked[cuda_on_host::g_item.x].fenced = true;
}
inline void llmc_products_end() {
  auto& own = cuda_on_host::g_asked[cuda_on_host::g_item.x];
  own.ended = own.asked.size();
}
// No item forgets what it asked for before those of its warp have read it.
template <int count, int operands, class Sum>
void llmc_products_wait(Sum*, const unsigned*) {
  using namespace cuda_on_host;
  Products& own = g_asked[g_item.x];
  if (own.ended != own.asked.size()) Refuse("a product that is waited for is in no committed group");
  g_now.Wait(Group::State::kInWarp);
  for (size_t i = 0; i < own.asked.size(); ++i) own.asked[i].multiply(i);
  g_now.Wait(Group::State::kInWarp);
  own.asked.clear();
  own.ended = 0;
  own.fenced = false;
}
inline unsigned llmc_shared_address(const void* of) {
  using namespace cuda_on_host;
  const auto address = reinterpret_cast<uintptr_t>(of);
  if (address - g_shared_begin >= kSharedBytes) g_shared_begin = address - kBefore;
  if ((address - g_shared_begin) % 16 != 0) Refuse("a matrix does not begin at a multiple of 16 bytes");
  return static_cast<unsigned>(address - g_shared_begin);
}
// Matrices of 8 rows by 16 bytes: lane 8m + i gives the address of row i of matrix m, and lane 4i + t has its word t.
inline void llmc_store_matrices(void* to, const unsigned* from) {
  using namespace cuda_on_host;
  const unsigned lane = g_item.x % kWarp, matrix = lane / 8, row = lane % 8;
  Written written{static_cast<unsigned char*>(to), {}};
  for (unsigned m = 0; m < 4; ++m) {
    const unsigned* words = Exchange(from[m]);
    if (m == matrix) std::memcpy(written.row, words + 4 * row, sizeof(written.row));
  }
  g_written[g_item.x].push_back(written);
}
inline void llmc_shared_visible() {
  auto& written = cuda_on_host::g_written[cuda_on_host::g_item.x];
  for (const auto& one : written) std::memcpy(one.to, one.row, sizeof(one.row));
  written.clear();
}
