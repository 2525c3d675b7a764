// What the stand-in of CUDA's driver knows: handles, memory, mistakes, and what a test orders to go wrong.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "stub_orders.h"

#define API extern "C" __attribute__((visibility("default"))) int

namespace stub_cuda {

enum Code { kOk = 0, kInvalidValue = 1, kNoMemory = 2, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101 };
enum More {
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600
};

struct World {
  std::recursive_mutex mutex;
  bool initialized = false;
  int lost = 0, retained = 0, captures = 0;
  std::map<std::string, int> calls;
  std::string orders;  // chance begins anew when they change
  std::mt19937 random;
  long long num_calls = 0, num_failed = 0;
  std::map<void*, std::string> alive;  // handles by kind
  std::map<char*, size_t> memory, pinned;  // of the device, of the host
  std::map<void*, size_t> execs;  // memory of the device that instances of graphs take
  std::vector<std::string> wrong, launched;  // what no program may do; kernels that ran

  size_t taken() const {
    size_t sum = 0;
    for (const auto& [at, bytes] : memory) sum += bytes;
    for (const auto& [at, bytes] : execs) sum += bytes;
    return sum;
  }
};
inline World& world() {
  static World* one = new World;  // outlives whatever ends last
  return *one;
}
inline char g_context;
inline thread_local std::vector<void*> t_contexts;

inline bool Said(const std::string& name, long long* value, long long* from = nullptr) {
  return Ordered("STUB_CUDA", name, value, from);
}
inline long long Fact(const char* name, long long otherwise) {
  Said(name, &otherwise);
  return otherwise;
}
inline bool Loses(int code) {
  return code == 214 || code == 226 || (code >= 700 && code <= 719 && code != 701) || code == 999;
}

inline int Wrong(const std::string& what, int code = kInvalidValue) {
  world().wrong.push_back(what);
  std::fprintf(stderr, "stub_cuda: %s\n", what.c_str());
  return code;
}

// The code with which a call fails by chance, or as the one that is ordered to.
inline int ByChance() {
  World& w = world();
  const char* now = std::getenv("STUB_CUDA");
  const std::string orders = now ? now : "";
  if (orders != w.orders) {
    w.orders = orders;
    w.num_calls = 0;
    w.random.seed(static_cast<unsigned>(Fact("seed", 1)));
  }
  const long long one_in = Fact("one_in", 0), only = Fact("only", 0), call = ++w.num_calls;
  if (call != only && (one_in <= 0 || w.random() % static_cast<unsigned long long>(one_in) != 0)) return kOk;
  ++w.num_failed;
  if (only) return static_cast<int>(Fact("code", kNoMemory));
  return w.random() % 2 ? kNoMemory : kInvalidValue;
}

// Lets other threads make calls between those of one, if a test says "pause_us=10".
inline void Pause() {
  if (const long long us = Fact("pause_us", 0)) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

// What a call begins with. context: whether it is about the thread's context.
#define BEGIN(name, context)                                       \
  Pause();                                                         \
  const std::lock_guard<std::recursive_mutex> lock(world().mutex); \
  if (const int code = Begin(name, context)) return code;
inline int Begin(const char* name, bool context) {
  World& w = world();
  const int call = ++w.calls[name];
  if (!w.initialized && std::strcmp(name, "Init") != 0)
    return Wrong(std::string(name) + " before cuInit", kNotInitialized);
  if (w.lost) return w.lost;
  long long code = 0, from = 1;
  if (Said(name, &code, &from) && call >= from) {
    if (Loses(static_cast<int>(code))) w.lost = static_cast<int>(code);
    if (code) return static_cast<int>(code);
  }
  if (context && t_contexts.empty()) return Wrong(std::string(name) + " without a context", kInvalidContext);
  // A driver that cannot make its context current can do nothing, not even give back.
  return std::strcmp(name, "CtxPushCurrent") != 0 ? ByChance() : kOk;
}

template <class T>
T* Make(const char* kind) {
  T* made = new T;
  world().alive[made] = kind;
  return made;
}
template <class T>
T* Alive(void* handle, const char* kind, const char* name) {
  const auto found = world().alive.find(handle);
  if (found != world().alive.end() && found->second == kind) return static_cast<T*>(handle);
  Wrong(std::string(name) + " of no " + kind);
  return nullptr;
}
template <class T>
int End(void* handle, const char* kind, const char* name) {
  T* of = Alive<T>(handle, kind, name);
  if (!of) return kInvalidHandle;
  world().alive.erase(handle);
  delete of;
  return kOk;
}

inline bool Inside(const std::map<char*, size_t>& of, const void* at, size_t bytes) {
  const auto* begin = static_cast<const char*>(at);
  auto next = of.upper_bound(const_cast<char*>(begin));
  if (next == of.begin()) return false;
  --next;
  return begin + bytes <= next->first + next->second;
}
inline void* Of(uint64_t device) { return reinterpret_cast<void*>(device); }

}  // namespace stub_cuda
