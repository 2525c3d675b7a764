// The OpenCL library of this machine, with calls that fail and devices that lack something. FAILING_OPENCL has orders
// (stub_orders.h), which a test may change at any time:
//
// NAME=CODE, NAME@N=CODE   a function fails, from its n-th call since the orders changed on
// once=1                   it fails in that call alone
// late=CODE                an enqueued command that fails does so on the device: it does nothing, the call succeeds, and
//                          whoever waits for its queue next gets the code
// one_in=N seed=S          each call of those below fails by chance, half of the enqueued commands late; a copy of 8 bytes
//                          that is waited for never does, so that the device is not lost
// replays=0                a command buffer that runs may not be enqueued again
// extensions=0             the device has no extensions: no command buffers, no subgroups, no half precision
// command_buffers=0, subgroups=0, fp16=0, fp64=0
//                          it has none of one kind; a program that uses what it lacks is not built
// dot=1                    it has cl_khr_integer_dot_product in programs of OpenCL C 3.0 alone; else it lacks it. Where the
//                          machine's driver has none, it is made of plain products
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <regex>
#include <sstream>
#include <string>

#include "stub_orders.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kByChance = -5, kLate = -14;

std::mutex g_mutex;
std::string g_orders;
std::map<std::string, long long> g_calls;
std::mt19937 g_random;
std::map<void*, int32_t> g_failed;  // what is to be told, by queue
uint64_t g_num_failures = 0;

long long Order(const char* name, long long otherwise) {
  Ordered("FAILING_OPENCL", name, &otherwise, nullptr);
  return otherwise;
}

template <class Function>
Function* Real(Function*, const char* name) {
  static void* library = dlopen("libOpenCL.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}
// The function of this machine's library that is called here.
#define REAL(name) Real(&name, #name)

// The code with which a call fails, if it does. *late: the command fails on the device.
int32_t Fails(const char* name, bool* late = nullptr, bool by_chance = true) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const char* now = std::getenv("FAILING_OPENCL");
  const std::string orders = now == nullptr ? "" : now;
  if (orders != g_orders) {
    g_orders = orders;
    g_calls.clear();
    g_failed.clear();
    g_random.seed(static_cast<uint32_t>(Order("seed", 1)));
  }
  if (orders.empty()) return 0;
  const long long call = ++g_calls[name], one_in = Order("one_in", 0);
  long long code = 0, from = 1;
  if (Ordered("FAILING_OPENCL", name, &code, &from) && (Order("once", 0) ? call == from : call >= from)) {
    const long long on_device = Order("late", 0);
    if (late != nullptr && on_device != 0) *late = true, code = on_device;
  } else if (code = 0; by_chance && one_in > 0 && g_random() % static_cast<unsigned long long>(one_in) == 0) {
    code = kByChance;
    if (late != nullptr && g_random() % 2 != 0) *late = true, code = kLate;
  }
  g_num_failures += code != 0;
  return static_cast<int32_t>(code);
}

// As Fails, for a command of a queue. *skip: it is not to be enqueued.
int32_t Enqueues(const char* name, void* queue, bool* skip, bool by_chance = true) {
  bool late = false;
  const int32_t code = Fails(name, &late, by_chance);
  *skip = code != 0;
  if (!late) return code;
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_failed[queue] = code;
  return 0;
}

// What somebody is told who has waited for a queue; nullptr: for any.
int32_t Told(void* queue, int32_t code) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = queue == nullptr ? g_failed.begin() : g_failed.find(queue);
  if (found == g_failed.end()) return code;
  code = found->second;
  g_failed.erase(found);
  return code;
}

}  // namespace

// Calls that have failed so far.
API uint64_t failing_opencl_failures() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return g_num_failures;
}

namespace {

// What a device may lack: the order, its extensions, and what a program that uses it says in its text or its options.
struct Lack {
  const char *order, *extensions, *text, *options;
};
constexpr Lack kLacks[] = {
    {"command_buffers", "cl_khr_command_buffer\\w*", nullptr, nullptr},
    {"subgroups", "cl_\\w+_subgroup\\w*", nullptr, "LLMC_LANES"},
    {"fp16", "cl_khr_fp16", "\\bhalf\\d*\\b|cl_khr_fp16", nullptr},
    {"fp64", "cl_khr_fp64", "\\bdouble\\d*\\b|cl_khr_fp64", nullptr},
};

constexpr const char* kDotExtension = "cl_khr_integer_dot_product";

// A device's extensions without those that it is to lack.
std::string WithoutLacks(const std::string& extensions) {
  std::istringstream words(extensions);
  std::string word, left;
  while (words >> word) {
    bool has = word != kDotExtension;
    for (const Lack& one : kLacks) {
      has = has && (Order(one.order, 1) != 0 || !std::regex_match(word, std::regex(one.extensions)));
    }
    if (has) left += word + " ";
  }
  return Order("dot", 0) != 0 ? left + kDotExtension : left;
}

// Another order of the products than that of kernels without the extension.
constexpr const char* kDotProducts = R"(
#ifndef __opencl_c_integer_dot_product_input_4x8bit_packed
#define __opencl_c_integer_dot_product_input_4x8bit_packed 1
int dot_4x8packed_ss_int(uint a, uint b) {
  int sum = 0;
  for (int up = 24; up >= 0; up -= 8) sum += (int)(char)(a >> up) * (int)(char)(b >> up);
  return sum;
}
#endif
)";
std::atomic<uint64_t> g_num_dot_programs{0};

}  // namespace

// Programs that were built with such functions.
API uint64_t failing_opencl_dot_programs() { return g_num_dot_programs; }
API void* clCreateProgramWithSource(void* context, uint32_t count, const char** texts, const size_t* sizes,
                                    int32_t* error) {
  constexpr int32_t kBuildFailure = -11;
  for (uint32_t i = 0; i < count; ++i) {
    const std::string text = sizes != nullptr && sizes[i] != 0 ? std::string(texts[i], sizes[i]) : texts[i];
    for (const Lack& one : kLacks) {
      const bool uses =
          one.text != nullptr && Order(one.order, 1) == 0 && std::regex_search(text, std::regex(one.text));
      if (uses) return *error = kBuildFailure, nullptr;
    }
  }
  if (Order("dot", 0) != 0 && count == 1) {
    const std::string text = kDotProducts + std::string(texts[0], sizes != nullptr ? sizes[0] : std::strlen(texts[0]));
    const char* whole = text.c_str();
    const size_t size = text.size();
    g_num_dot_programs += text.find("llmc_dot4") != std::string::npos;
    return REAL(clCreateProgramWithSource)(context, 1, &whole, &size, error);
  }
  return REAL(clCreateProgramWithSource)(context, count, texts, sizes, error);
}
API int32_t clBuildProgram(void* program, uint32_t n, void* const* devices, const char* options, void* told, void* of) {
  if (const int32_t code = Fails("BuildProgram", nullptr, false)) return code;
  constexpr int32_t kBuildFailure = -11;
  if (Order("dot", 0) != 0 && std::strstr(options, "-cl-std=CL3.0") == nullptr) return kBuildFailure;
  for (const Lack& one : kLacks) {
    if (one.options != nullptr && Order(one.order, 1) == 0 && std::strstr(options, one.options) != nullptr) {
      return kBuildFailure;
    }
  }
  return REAL(clBuildProgram)(program, n, devices, options, told, of);
}
API int32_t clGetDeviceInfo(void* device, uint32_t what, size_t room, void* to, size_t* size) {
  constexpr uint32_t kExtensions = 0x1030, kDoubles = 0x1032, kCapabilities = 0x12A9;
  constexpr uint64_t kSimultaneousUse = 1 << 2;
  if (what == kExtensions && Order("extensions", 1) == 0) {
    if (size != nullptr) *size = 1;
    if (to != nullptr && room > 0) *static_cast<char*>(to) = '\0';
    return 0;
  }
  if (what == kExtensions) {
    size_t whole = 0;
    int32_t code = REAL(clGetDeviceInfo)(device, what, 0, nullptr, &whole);
    std::string all(whole, '\0');
    if (code == 0) code = REAL(clGetDeviceInfo)(device, what, whole, all.data(), nullptr);
    if (code != 0) return code;
    const std::string left = WithoutLacks(all.c_str());
    if (size != nullptr) *size = left.size() + 1;
    if (to != nullptr) std::memcpy(to, left.c_str(), std::min(room, left.size() + 1));
    return 0;
  }
  const int32_t code = REAL(clGetDeviceInfo)(device, what, room, to, size);
  if (what == kDoubles && code == 0 && to != nullptr && Order("fp64", 1) == 0) std::memset(to, 0, room);
  if (what == kCapabilities && code == 0 && to != nullptr && Order("replays", 1) == 0) {
    *static_cast<uint64_t*>(to) &= ~kSimultaneousUse;
  }
  return code;
}
API void* clCreateBuffer(void* context, uint64_t flags, size_t bytes, void* host, int32_t* error) {
  if (const int32_t code = Fails("CreateBuffer")) return *error = code, nullptr;
  return REAL(clCreateBuffer)(context, flags, bytes, host, error);
}
API int32_t clEnqueueNDRangeKernel(void* queue, void* kernel, uint32_t dimensions, const size_t* offset,
                                   const size_t* global, const size_t* local, uint32_t n, void* const* events,
                                   void** out) {
  bool skip = false;
  const int32_t code = Enqueues("EnqueueNDRangeKernel", queue, &skip);
  if (skip) return code;
  return REAL(clEnqueueNDRangeKernel)(queue, kernel, dimensions, offset, global, local, n, events, out);
}
API int32_t clEnqueueWriteBuffer(void* queue, void* memory, uint32_t blocks, size_t at, size_t bytes, const void* from,
                                 uint32_t n, void* const* events, void** out) {
  bool skip = false;
  const int32_t code = Enqueues("EnqueueWriteBuffer", queue, &skip, !blocks || bytes != 8);
  if (skip) return blocks ? Told(queue, code) : code;
  const int32_t done = REAL(clEnqueueWriteBuffer)(queue, memory, blocks, at, bytes, from, n, events, out);
  return blocks ? Told(queue, done) : done;
}
API int32_t clEnqueueReadBuffer(void* queue, void* memory, uint32_t blocks, size_t at, size_t bytes, void* to,
                                uint32_t n, void* const* events, void** out) {
  bool skip = false;
  const int32_t code = Enqueues("EnqueueReadBuffer", queue, &skip, !blocks || bytes != 8);
  if (skip) return blocks ? Told(queue, code) : code;
  const int32_t done = REAL(clEnqueueReadBuffer)(queue, memory, blocks, at, bytes, to, n, events, out);
  return blocks ? Told(queue, done) : done;
}
API int32_t clEnqueueCopyBuffer(void* queue, void* from, void* to, size_t from_at, size_t to_at, size_t bytes,
                                uint32_t n, void* const* events, void** out) {
  bool skip = false;
  const int32_t code = Enqueues("EnqueueCopyBuffer", queue, &skip);
  return skip ? code : REAL(clEnqueueCopyBuffer)(queue, from, to, from_at, to_at, bytes, n, events, out);
}
API int32_t clEnqueueMarkerWithWaitList(void* queue, uint32_t n, void* const* events, void** out) {
  if (const int32_t code = Fails("EnqueueMarkerWithWaitList")) return code;
  return REAL(clEnqueueMarkerWithWaitList)(queue, n, events, out);
}
API int32_t clWaitForEvents(uint32_t n, void* const* events) {
  const int32_t code = REAL(clWaitForEvents)(n, events), fails = Fails("WaitForEvents");
  return Told(nullptr, fails != 0 ? fails : code);
}
API int32_t clFlush(void* queue) {
  const int32_t code = REAL(clFlush)(queue), fails = Fails("Flush");
  return fails != 0 ? fails : code;
}
API int32_t clFinish(void* queue) {
  const int32_t code = REAL(clFinish)(queue), fails = Fails("Finish");
  return Told(queue, fails != 0 ? fails : code);
}

namespace {

using Enqueue = int32_t (*)(uint32_t, void**, void*, uint32_t, void* const*, void**);
using Create = void* (*)(uint32_t, void* const*, const intptr_t*, int32_t*);
Enqueue g_enqueue = nullptr;
Create g_create = nullptr;
std::map<void*, void*> g_queues;  // by command buffer

int32_t EnqueueBuffer(uint32_t n, void** queues, void* buffer, uint32_t count, void* const* events, void** out) {
  void* queue = nullptr;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    queue = g_queues[buffer];
  }
  bool skip = false;
  const int32_t code = Enqueues("EnqueueCommandBuffer", queue, &skip);
  return skip ? code : g_enqueue(n, queues, buffer, count, events, out);
}
void* CreateBuffer(uint32_t n, void* const* queues, const intptr_t* properties, int32_t* error) {
  if (const int32_t code = Fails("CreateCommandBuffer")) return *error = code, nullptr;
  void* made = g_create(n, queues, properties, error);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_queues[made] = queues[0];
  return made;
}

}  // namespace

API void* clGetExtensionFunctionAddressForPlatform(void* platform, const char* name) {
  void* real = REAL(clGetExtensionFunctionAddressForPlatform)(platform, name);
  const std::string of = name;
  if (real != nullptr && of == "clEnqueueCommandBufferKHR") {
    g_enqueue = reinterpret_cast<Enqueue>(real);
    return reinterpret_cast<void*>(&EnqueueBuffer);
  }
  if (real != nullptr && of == "clCreateCommandBufferKHR") {
    g_create = reinterpret_cast<Create>(real);
    return reinterpret_cast<void*>(&CreateBuffer);
  }
  return real;
}
