// CUDA C++ as C++ of the host: what cuda_on_host.py puts before the kernels of a device of kind cuda. The items of a group
// are fibers of one thread, which take turns at each barrier; groups run one after the other.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

struct Group {
  std::vector<Fiber> fibers;
  std::vector<char> stacks, done;
  Fiber scheduler;
  std::function<void()> kernel;
  unsigned current = 0;

  void Run(unsigned items) {
    fibers.resize(items);
    stacks.resize(items * kStackBytes);
    done.assign(items, 0);
    for (unsigned i = 0; i < items; ++i) fibers[i].Begin(stacks.data() + i * kStackBytes, kStackBytes, Enter);
    for (bool any = true; any;) {
      any = false;
      for (current = 0; current < items; ++current) {
        if (done[current]) continue;
        g_item.x = current;
        Fiber::Switch(&scheduler, &fibers[current]);
        any = any || !done[current];
      }
      // All items of a group come to a barrier, or none.
      if (any && std::count(done.begin(), done.end(), 1) != 0) std::abort();
    }
  }
  void Yield() { Fiber::Switch(&fibers[current], &scheduler); }
  static void Enter();
};
inline Group g_now;
inline void Group::Enter() {
  g_now.kernel();
  g_now.done[g_now.current] = 1;
  g_now.Yield();
}

template <class... A, size_t... I>
void RunAll(void (*kernel)(A...), void** arguments, unsigned groups, unsigned items, std::index_sequence<I...>) {
  g_groups.x = groups;
  for (unsigned group = 0; group < groups; ++group) {
    g_group.x = group;
    g_now.kernel = [&] { kernel(*static_cast<A*>(arguments[I])...); };
    g_now.Run(items);
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

inline void __syncthreads() { cuda_on_host::g_now.Yield(); }
inline int __float_as_int(float x) { return cuda_on_host::Bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_host::Bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_host::Bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_host::Bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_host::Bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_host::Bits<double>(x); }
using std::fma;
using std::max;
using std::min;
