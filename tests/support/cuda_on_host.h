// CUDA C++ as C++ of the host: what cuda_on_host.py puts before the kernels of a device of kind cuda. The items of a group
// are fibers of one thread, which take turns where they wait for each other; groups run one after the other.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__
#define alignas(...)  // between `static` and a type C++ does not take it

namespace cuda_on_host {

struct Place {
  unsigned x = 0, y = 0, z = 0;
};

inline Place g_group, g_item, g_groups;

// Ends the process: a kernel did what a GPU leaves undefined, or has an error for.
[[noreturn]] inline void Refuse(const char* why) {
  std::fprintf(stderr, "cuda_on_host: group %u, item %u: %s\n", g_group.x, g_item.x, why);
  std::abort();
}

#ifdef __x86_64__
// Keeps what a call keeps, on the stack, and goes on where `to` left off.
extern "C" void cuda_on_host_switch(void** from, void* to);
asm(R"(
.text
.local cuda_on_host_switch
.type cuda_on_host_switch,@function
cuda_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
struct Fiber {
  void* stack_pointer = nullptr;
  void Begin(char* stack, size_t bytes, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(stack + bytes / 16 * 16);
    *--top = nullptr;  // where a function that returns would go on: none does
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  static void Switch(Fiber* from, Fiber* to) { cuda_on_host_switch(&from->stack_pointer, to->stack_pointer); }
};
#else
struct Fiber {
  ucontext_t context{};
  void Begin(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    makecontext(&context, entry, 0);
  }
  static void Switch(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }
};
#endif

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarp = 32, kMostItems = 1024;

struct Group {
  std::vector<Fiber> fibers;
  std::vector<char> stacks;
  enum class State : char { kRuns, kInWarp, kInGroup, kAwaits, kDone };  // where it waits for all others
  std::vector<State> states;
  Fiber scheduler;
  std::function<void()> kernel;
  unsigned current = 0;

  void Run(unsigned items) {
    fibers.resize(items);
    stacks.resize(items * kStackBytes);
    states.assign(items, State::kRuns);
    for (unsigned i = 0; i < items; ++i) fibers[i].Begin(stacks.data() + i * kStackBytes, kStackBytes, Enter);
    while (!All(0, items, State::kDone)) {
      bool any = false;
      // Each warp goes as far as it can without the others, so that it overtakes those that it should wait for.
      for (unsigned warp = 0; warp < items; warp += kWarp) {
        const unsigned end = std::min(warp + kWarp, items);
        while (RunSome(warp, end)) {
          any = true;
          Release(warp, end, State::kInWarp);
        }
      }
      // All of those who wait for each other come, or none.
      if (!any) Refuse("some items wait where others do not come");
      Release(0, items, State::kInGroup);
      if (All(0, items, State::kAwaits)) {
        Arrive();
        Release(0, items, State::kAwaits);
      }
    }
  }
  // Whether any of these items went on.
  bool RunSome(unsigned begin, unsigned end) {
    bool any = false;
    for (current = begin; current < end; ++current) {
      if (states[current] != State::kRuns) continue;
      any = true;
      g_item.x = current;
      Fiber::Switch(&scheduler, &fibers[current]);
    }
    return any;
  }
  void Wait(State where) {
    states[current] = where;
    Fiber::Switch(&fibers[current], &scheduler);
  }
  bool All(unsigned begin, unsigned end, State state) const {
    return std::all_of(states.begin() + begin, states.begin() + end, [&](State one) { return one == state; });
  }
  void Release(unsigned begin, unsigned end, State where) {
    if (All(begin, end, where)) std::fill(states.begin() + begin, states.begin() + end, State::kRuns);
  }
  static void Enter();
  static void Arrive();
};
inline Group g_now;
inline void Group::Enter() {
  g_now.kernel();
  g_now.Wait(State::kDone);
}

// Memory that earlier kernels read and write, as a test has named it: for each group it is not what it will be before all
// items of the group have waited for it. What they write before that is lost.
struct Late {
  unsigned char* at;
  std::vector<unsigned char> kept;
};
inline std::vector<Late> g_late;
inline bool g_arrived = true;
inline unsigned g_impatient = 0;  // groups that did not wait
inline void Depart() {
  g_arrived = g_late.empty();
  for (Late& late : g_late) {
    std::copy_n(late.at, late.kept.size(), late.kept.data());
    std::fill_n(late.at, late.kept.size(), static_cast<unsigned char>(0xff));
  }
}
inline void Group::Arrive() {
  g_arrived = true;
  for (const Late& late : g_late) std::copy(late.kept.begin(), late.kept.end(), late.at);
}
extern "C" void cuda_on_host_late(void* at, size_t bytes) {
  if (bytes == 0) return g_late.clear();
  g_late.push_back({static_cast<unsigned char*>(at), std::vector<unsigned char>(bytes)});
}
extern "C" unsigned cuda_on_host_impatient() { return g_impatient; }

template <class... A, size_t... I>
void RunAll(void (*kernel)(A...), void** arguments, unsigned groups, unsigned items, std::index_sequence<I...>) {
  g_groups.x = groups;
  for (unsigned group = 0; group < groups; ++group) {
    g_group.x = group;
    g_now.kernel = [&] { kernel(*static_cast<A*>(arguments[I])...); };
    Depart();
    g_now.Run(items);
    g_impatient += !g_arrived;
    if (!g_arrived) Group::Arrive();
  }
}
template <class... A>
void Run(void (*kernel)(A...), void** arguments, unsigned groups, unsigned items) {
  RunAll(kernel, arguments, groups, items, std::index_sequence_for<A...>());
}

template <class To, class From>
To Bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof(to));
  return to;
}

}  // namespace cuda_on_host

#define blockIdx cuda_on_host::g_group
#define threadIdx cuda_on_host::g_item
#define gridDim cuda_on_host::g_groups

inline void __syncthreads() { cuda_on_host::g_now.Wait(cuda_on_host::Group::State::kInGroup); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
}
inline int __float_as_int(float x) { return cuda_on_host::Bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_host::Bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_host::Bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_host::Bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_host::Bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_host::Bits<double>(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 32; i += 8) found |= static_cast<unsigned>(bytes >> 8 * (which >> i / 2 & 7) & 255) << i;
  return found;
}
using std::fma;
using std::max;
using std::min;

// What tensor cores and asynchronous copies do (compiler/targets/gpu/cuda_prelude.py).
namespace cuda_on_host {

// Fragments that the lanes of a warp give: each lane has its own numbers of a product, and needs those of others. Two,
// for a lane may give its next ones before others have read these.
struct Fragments {
  unsigned a[kWarp][4], b[kWarp][2];
};
inline Fragments g_fragments[kMostItems / kWarp][2];
inline unsigned char g_products[kMostItems];  // of an item, odd or even

// Rows and columns as the PTX manual numbers them: lane 4r + t has of a, words of neighbours along K, (r, t), (r + 8, t),
// (r, t + 4), (r + 8, t + 4), of b (t, r), (t + 4, r), and of c (r, 2t), (r, 2t + 1), (r + 8, 2t), (r + 8, 2t + 1).
inline unsigned WordOfA(const Fragments& f, unsigned row, unsigned word) {
  return f.a[4 * (row % 8) + word % 4][row / 8 + 2 * (word / 4)];
}
inline unsigned WordOfB(const Fragments& f, unsigned column, unsigned word) {
  return f.b[4 * column + word % 4][word / 4];
}

// In order of K; hardware may have another order within one product.
template <class C, class Add>
void Multiply(C* c, const unsigned (&a)[4], const unsigned (&b)[2], Add add) {
  const unsigned item = g_item.x, lane = item % kWarp;
  Fragments& f = g_fragments[item / kWarp][g_products[item] ^= 1];
  std::copy_n(a, 4, f.a[lane]);
  std::copy_n(b, 2, f.b[lane]);
  g_now.Wait(Group::State::kInWarp);
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (unsigned word = 0; word < 8; ++word) c[i] = add(c[i], WordOfA(f, row, word), WordOfB(f, column, word));
  }
}

inline float OfBf16(unsigned bits) { return Bits<float>(bits << 16); }
inline float OfF16(unsigned bits) {
  const unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent     ? std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25)
                                         : std::ldexp(static_cast<float>(mantissa), -24);
  return bits >> 15 & 1 ? -magnitude : magnitude;
}
// Of numbers that float16 has.
inline unsigned ExactF16(float x) {
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  if (x == 0.0f) return sign;
  int exponent = 0;
  const float mantissa = std::frexp(std::fabs(x), &exponent);
  const auto whole = static_cast<unsigned>(std::ldexp(mantissa, 11));
  if (std::ldexp(static_cast<float>(whole), exponent - 11) != std::fabs(x)) Refuse("float16 does not have a number");
  return sign | static_cast<unsigned>(exponent + 14) << 10 | (whole & 1023);
}

// What the lanes of a warp give each other, as fragments.
inline unsigned g_words[kMostItems / kWarp][2][kWarp];
inline const unsigned* Exchange(unsigned word) {
  const unsigned item = g_item.x;
  unsigned* words = g_words[item / kWarp][g_products[item] ^= 1];
  words[item % kWarp] = word;
  g_now.Wait(Group::State::kInWarp);
  return words;
}
inline unsigned RoundedBf16(float x) {
  const auto bits = Bits<unsigned>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned RoundedF16(float x) {
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  int exponent = 0;
  std::frexp(x, &exponent);
  // 11 digits, or down to the smallest subnormal.
  const int unit = std::max(exponent - 11, -24);
  const float nearest = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
  if (std::fabs(nearest) > 65504.0f) return sign | 0x7c00;
  if (std::fabs(nearest) < 0x1p-14f) return sign | static_cast<unsigned>(std::ldexp(std::fabs(nearest), 24));
  return ExactF16(nearest);
}

// Copies of an item that were asked for, and how many of them ended groups have. They come when they are waited for.
struct Copies {
  struct One {
    void* to;
    const void* from;
    size_t bytes;
  };
  std::vector<One> asked;
  std::vector<size_t> ends;
  void Wait(size_t but) {
    while (ends.size() > but) {
      for (size_t i = 0; i < ends[0]; ++i) std::memcpy(asked[i].to, asked[i].from, asked[i].bytes);
      const auto done = static_cast<ptrdiff_t>(ends[0]);
      asked.erase(asked.begin(), asked.begin() + done);
      ends.erase(ends.begin());
      for (size_t& end : ends) end -= static_cast<size_t>(done);
    }
  }
};
inline Copies g_copies[kMostItems];
inline void Copy(void* to, const void* from, size_t bytes) {
  // Shared memory is aligned where a kernel runs; here it is not.
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) Refuse("a copy begins at no multiple of its size");
  g_copies[g_item.x].asked.push_back({to, from, bytes});
}

}  // namespace cuda_on_host

inline void llmc_mma_bf16(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  using namespace cuda_on_host;
  Multiply(c, {a0, a1, a2, a3}, {b0, b1}, [](float sum, unsigned a, unsigned b) {
    sum = std::fma(OfBf16(a & 0xffff), OfBf16(b & 0xffff), sum);
    return std::fma(OfBf16(a >> 16), OfBf16(b >> 16), sum);
  });
}
inline void llmc_mma_f16(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  using namespace cuda_on_host;
  Multiply(c, {a0, a1, a2, a3}, {b0, b1}, [](float sum, unsigned a, unsigned b) {
    sum = std::fma(OfF16(a & 0xffff), OfF16(b & 0xffff), sum);
    return std::fma(OfF16(a >> 16), OfF16(b >> 16), sum);
  });
}
inline void llmc_mma_i8(int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  cuda_on_host::Multiply(c, {a0, a1, a2, a3}, {b0, b1}, [](int sum, unsigned a, unsigned b) {
    for (int i = 0; i < 32; i += 8) sum += static_cast<uint8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return sum;
  });
}
inline unsigned llmc_rounded_bf16(float low, float high) {
  return cuda_on_host::RoundedBf16(low) | cuda_on_host::RoundedBf16(high) << 16;
}
inline unsigned llmc_rounded_f16(float low, float high) {
  return cuda_on_host::RoundedF16(low) | cuda_on_host::RoundedF16(high) << 16;
}
inline int llmc_late(int number) { return number; }
inline unsigned llmc_masked(unsigned word, unsigned mask, unsigned bits) { return (word & mask) | bits; }
inline unsigned llmc_added_bf16(unsigned pair, unsigned other) {
  using namespace cuda_on_host;
  return llmc_rounded_bf16(OfBf16(pair & 0xffff) + OfBf16(other & 0xffff), OfBf16(pair >> 16) + OfBf16(other >> 16));
}
inline unsigned llmc_added_f16(unsigned pair, unsigned other) {
  using namespace cuda_on_host;
  return llmc_rounded_f16(OfF16(pair & 0xffff) + OfF16(other & 0xffff), OfF16(pair >> 16) + OfF16(other >> 16));
}
inline unsigned llmc_times_bf16(unsigned pair, unsigned factor) {
  using namespace cuda_on_host;
  return llmc_rounded_bf16(OfBf16(pair & 0xffff) * OfBf16(factor), OfBf16(pair >> 16) * OfBf16(factor));
}
inline unsigned llmc_times_f16(unsigned pair, unsigned factor) {
  using namespace cuda_on_host;
  return llmc_rounded_f16(OfF16(pair & 0xffff) * OfF16(factor), OfF16(pair >> 16) * OfF16(factor));
}
inline unsigned llmc_highest(unsigned nibbles) {
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (nibbles >> (4 * i + 3) & 1 ? 0xffu : 0x80u) << 8 * i;
  return found;
}
inline float llmc_low_f16(unsigned pair) { return cuda_on_host::OfF16(pair & 0xffff); }
template <typename Number>
Number llmc_of_lane(Number own, int lanes) {
  using namespace cuda_on_host;
  const unsigned from = g_item.x % kWarp ^ static_cast<unsigned>(lanes);
  unsigned words[sizeof(Number) / sizeof(unsigned)];
  std::memcpy(words, &own, sizeof(Number));
  for (unsigned& word : words) word = Exchange(word)[from];
  std::memcpy(&own, words, sizeof(Number));
  return own;
}
inline unsigned llmc_transposed(unsigned pair) {
  const unsigned lane = cuda_on_host::g_item.x % cuda_on_host::kWarp, column = lane / 4, row = 2 * (lane % 4);
  const unsigned* words = cuda_on_host::Exchange(pair);
  auto number = [&](unsigned of) { return words[4 * of + column / 2] >> 16 * (column % 2) & 0xffff; };
  return number(row) | number(row + 1) << 16;
}
inline void llmc_await_earlier() {
  if (!cuda_on_host::g_arrived) cuda_on_host::g_now.Wait(cuda_on_host::Group::State::kAwaits);
}
inline void llmc_let_later_begin() {}
inline void llmc_copy16(void* to, const void* from) { cuda_on_host::Copy(to, from, 16); }
inline void llmc_copy4(void* to, const void* from) { cuda_on_host::Copy(to, from, 4); }
inline void llmc_copies_end() {
  auto& copies = cuda_on_host::g_copies[cuda_on_host::g_item.x];
  copies.ends.push_back(copies.asked.size());
}
template <int count>
void llmc_copies_wait() {
  cuda_on_host::g_copies[cuda_on_host::g_item.x].Wait(count);
}
inline void llmc_prefetch(const void* of) { static_cast<void>(*static_cast<const volatile char*>(of)); }
inline void llmc_load16(unsigned* to, const void* from) { std::memcpy(to, from, 16); }
inline void llmc_load8(unsigned* to, const void* from) { std::memcpy(to, from, 8); }
inline void llmc_store16(void* to, const unsigned* from) { std::memcpy(to, from, 16); }
inline void llmc_store8(void* to, const unsigned* from) { std::memcpy(to, from, 8); }
inline void llmc_load4(unsigned* to, const void* from) { std::memcpy(to, from, 4); }
