// A CUDA driver without a GPU, as strict as one can be: every handle, pointer, size and order is checked, and what was put
// into a stream happens as late as it may. Kernels compute nothing, unless STUB_CUDA_KERNELS names a library that has them
// for the host (cuda_on_host.py). What STUB_CUDA says, as in "MemAlloc=2 devices=0", goes wrong: a function returns a code
// (from its n-th call on: "GraphLaunch@3=700"), or a fact has another value. Calls also fail by chance, with errors that
// lose no device ("one_in=100 seed=7"), or one of all that are made since the orders changed ("only=5"). Tests ask what
// happened by the functions at the end.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stub_orders.h"

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

enum Code { kOk = 0, kInvalidValue = 1, kNoMemory = 2, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101 };
enum More {
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600
};

// A kernel as its code says it: sizes of its arguments, the most items of a group.
struct Kernel {
  std::string name;
  std::vector<int> sizes;
  unsigned most_items = 1024;
  bool awaits = true;  // waits for earlier kernels, as far as the stub can tell
};
struct Launch {
  const Kernel* kernel;
  unsigned groups, items;
  std::vector<uint64_t> values;
  bool early = false;  // begins before the one before it has ended
};
struct Module {
  std::vector<std::unique_ptr<Kernel>> kernels;
};
struct Event {
  uint64_t stream_end = 0;  // operations of the stream that it waits for
  struct Stream* stream = nullptr;
};
// work: told how it runs, "launched" or "replayed". False: it waits for another process, and is called again.
struct Operation {
  std::function<bool(const char* how)> work;
  std::vector<const void*> uses;  // memory, kernels, graphs, communicators
  const char* how = "launched";
  bool kernel = false;
};
struct Graph {
  std::vector<std::unique_ptr<Operation>> nodes;
};
struct Stream {
  std::deque<Operation> waiting;
  uint64_t added = 0, done = 0;
  Graph* captured = nullptr;
};
struct Exec {
  std::vector<Operation> steps;
  size_t bytes = 0;
  bool uploaded = false;
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
  std::vector<std::string> wrong, launched;  // what no program may do; kernels that ran

  size_t taken() const {
    size_t sum = 0;
    for (const auto& [at, bytes] : memory) sum += bytes;
    for (const auto& [handle, kind] : alive) {
      if (kind == "exec") sum += static_cast<Exec*>(handle)->bytes;
    }
    return sum;
  }
};
World& world() {
  static World* one = new World;  // outlives whatever ends last
  return *one;
}
char g_context;
thread_local std::vector<void*> t_contexts;

bool Said(const std::string& name, long long* value, long long* from = nullptr) {
  return Ordered("STUB_CUDA", name, value, from);
}
long long Fact(const char* name, long long otherwise) {
  Said(name, &otherwise);
  return otherwise;
}
bool Loses(int code) {
  return code == 214 || code == 226 || (code >= 700 && code <= 719 && code != 701) || code == 999;
}

int Wrong(const std::string& what, int code = kInvalidValue) {
  world().wrong.push_back(what);
  std::fprintf(stderr, "stub_cuda: %s\n", what.c_str());
  return code;
}

// The code with which a call fails by chance, or as the one that is ordered to.
int ByChance() {
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

// What a call begins with. context: whether it is about the thread's context.
#define BEGIN(name, context)                                       \
  const std::lock_guard<std::recursive_mutex> lock(world().mutex); \
  if (const int code = Begin(name, context)) return code;
int Begin(const char* name, bool context) {
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

bool Inside(const std::map<char*, size_t>& of, const void* at, size_t bytes) {
  const auto* begin = static_cast<const char*>(at);
  auto next = of.upper_bound(const_cast<char*>(begin));
  if (next == of.begin()) return false;
  --next;
  return begin + bytes <= next->first + next->second;
}
void* Of(uint64_t device) { return reinterpret_cast<void*>(device); }

// What a stream has to do, until there is no more or `end` operations are done. False: one waits for another process.
bool Proceed(Stream* s, uint64_t end = UINT64_MAX) {
  while (!s->waiting.empty() && s->done < end) {
    const Operation& next = s->waiting.front();
    if (!next.work(next.how)) return false;
    s->waiting.pop_front();
    ++s->done;
  }
  return true;
}
void Drain(Stream* s, uint64_t end = UINT64_MAX) {
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!Proceed(s, end)) {
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() < late) continue;
    Wrong("a stream is waited for whose work waits for another process");
    s->waiting.clear();
    s->done = s->added;
  }
}
int AddWaiting(Stream* s, std::vector<const void*> uses, std::function<bool(const char*)> work, bool kernel = false) {
  Operation one{std::move(work), std::move(uses)};
  one.kernel = kernel;
  if (s->captured) {
    s->captured->nodes.push_back(std::make_unique<Operation>(std::move(one)));
    return kOk;
  }
  s->waiting.push_back(std::move(one));
  ++s->added;
  return kOk;
}
template <class Work>
int Add(Stream* s, std::vector<const void*> uses, Work work) {
  return AddWaiting(s, std::move(uses), [work](const char*) { return work(), true; });
}
// Whether what waits in a stream uses memory from `at` on, or a handle.
bool Used(const void* at, size_t bytes = 1) {
  const auto* begin = static_cast<const char*>(at);
  for (const auto& [handle, kind] : world().alive) {
    if (kind != "stream") continue;
    for (const Operation& one : static_cast<Stream*>(handle)->waiting) {
      for (const void* used : one.uses) {
        if (used >= begin && used < begin + bytes) return true;
      }
    }
  }
  return false;
}

// The kernels that a text of PTX has.
void Entries(const char* text, Module* module) {
  for (const char* at = std::strstr(text, ".entry "); at; at = std::strstr(at, ".entry ")) {
    at += 7;
    auto kernel = std::make_unique<Kernel>();
    const char* open = std::strchr(at, '(');
    const char* close = open ? std::strchr(open, ')') : nullptr;
    if (!close) return;
    kernel->name.assign(at, open);
    for (const char* param = open; (param = std::strstr(param, ".param .")) && param < close; ++param) {
      kernel->sizes.push_back(param[9] == '6' ? 8 : 4);
    }
    const char* begins = std::strstr(close, "llmc_let_later_begin();");
    const char* waits = std::strstr(close, "llmc_await_earlier();");
    kernel->awaits = begins && waits && begins < waits;
    const char* most = std::strstr(close, ".maxntid ");
    const char* body = std::strchr(close, '{');
    if (most && (!body || most < body)) kernel->most_items = static_cast<unsigned>(std::atoi(most + 9));
    module->kernels.push_back(std::move(kernel));
  }
}

// The kernels of machine code: an ELF file whose sections .nv.info.NAME list the arguments.
int Elf(const unsigned char* image, int capability, Module* module) {
  const auto at = [&](auto* out, uint64_t offset) { std::memcpy(out, image + offset, sizeof(*out)); };
  uint16_t machine = 0, count = 0, names = 0;
  uint32_t flags = 0;
  uint64_t sections = 0;
  at(&machine, 18), at(&flags, 48), at(&sections, 40), at(&count, 60), at(&names, 62);
  const int built = image[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff;
  if (machine != 190) return Wrong("a module of another machine", kInvalidImage);
  if (built / 10 != capability / 10 || built > capability) return kNoBinary;
  const auto section = [&](uint16_t index, uint32_t* name, uint64_t* offset, uint64_t* bytes) {
    at(name, sections + index * 64), at(offset, sections + index * 64 + 24), at(bytes, sections + index * 64 + 32);
  };
  uint32_t name = 0;
  uint64_t strings = 0, bytes = 0;
  section(names, &name, &strings, &bytes);
  for (uint16_t i = 0; i < count; ++i) {
    uint64_t offset = 0;
    section(i, &name, &offset, &bytes);
    const std::string title = reinterpret_cast<const char*>(image + strings + name);
    if (title.rfind(".nv.info.", 0) != 0) continue;
    auto kernel = std::make_unique<Kernel>();
    kernel->name = title.substr(9);
    std::map<int, int> sizes;
    for (uint64_t a = offset; a + 4 <= offset + bytes;) {
      const int format = image[a], attribute = image[a + 1];
      uint16_t size = 0;
      at(&size, a + 2);
      if (format == 4 && attribute == 0x17) {  // one argument
        uint16_t ordinal = 0;
        uint32_t packed = 0;
        at(&ordinal, a + 8), at(&packed, a + 12);
        sizes[ordinal] = static_cast<int>(packed >> 18 & 0x3fff);
      }
      a += 4 + (format == 4 ? size : 0);
    }
    for (const auto& [ordinal, bytes_of] : sizes) kernel->sizes.push_back(bytes_of);
    module->kernels.push_back(std::move(kernel));
  }
  return kOk;
}

int Take(const char* name, Kernel* kernel, const unsigned* grid, const unsigned* block, unsigned shared,
         void** arguments, Launch* out) {
  if (!kernel) return kInvalidHandle;
  const std::string what = std::string(name) + " of " + kernel->name;
  if (grid[0] < 1 || grid[0] > 65536 || grid[1] != 1 || grid[2] != 1) return Wrong(what + ": its grid");
  if (block[0] < 1 || block[0] > kernel->most_items || block[1] != 1 || block[2] != 1)
    return Wrong(what + ": its groups");
  if (shared != 0) return Wrong(what + ": shared memory that nobody uses");
  *out = {kernel, grid[0], block[0], {}};
  for (const int size : kernel->sizes) {
    uint64_t value = 0;
    if (!arguments || !*arguments) return Wrong(what + ": an argument is missing");
    std::memcpy(&value, *arguments++, static_cast<size_t>(size));
    const bool known = Inside(world().memory, Of(value), 4) || Inside(world().pinned, Of(value), 4);
    if (size == 8 && (value % 64 || !known)) {
      return Wrong(what + ": an argument is no memory of the GPU");
    }
    out->values.push_back(value);
  }
  return kOk;
}

std::vector<const void*> Uses(const Launch& launch) {
  std::vector<const void*> uses = {launch.kernel};
  for (size_t i = 0; i < launch.values.size(); ++i) {
    if (launch.kernel->sizes[i] == 8) uses.push_back(Of(launch.values[i]));
  }
  return uses;
}

using OnHost = void (*)(void**, unsigned groups, unsigned items);

void Run(const Launch& launch, const char* how) {
  World& w = world();
  std::vector<uint64_t> values = launch.values;
  std::vector<void*> arguments;
  for (uint64_t& value : values) arguments.push_back(&value);
  w.launched.push_back(launch.kernel->name + " " + std::to_string(launch.groups) + " " + how +
                       (launch.early ? "+" : ""));
  const char* path = std::getenv("STUB_CUDA_KERNELS");
  if (!path) return;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const auto run = library ? reinterpret_cast<OnHost>(dlsym(library, ("run_" + launch.kernel->name).c_str())) : nullptr;
  if (!run) return static_cast<void>(Wrong("no kernel " + launch.kernel->name + " for the host"));
  run(arguments.data(), launch.groups, launch.items);
}

}  // namespace

API cuInit(unsigned flags) {
  BEGIN("Init", false)
  if (flags) return Wrong("cuInit with flags");
  world().initialized = true;
  return kOk;
}
API cuDriverGetVersion(int* version) {
  BEGIN("DriverGetVersion", false)
  *version = static_cast<int>(Fact("driver", 13000));
  return kOk;
}
API cuGetErrorName(int code, const char** name) {
  *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : nullptr;
  return *name ? kOk : kInvalidValue;
}
API cuDeviceGetCount(int* count) {
  BEGIN("DeviceGetCount", false)
  *count = static_cast<int>(Fact("devices", 1));
  return kOk;
}
API cuDeviceGet(int* device, int number) {
  BEGIN("DeviceGet", false)
  if (number < 0 || number >= Fact("devices", 1)) return Wrong("cuDeviceGet of no device", kInvalidDevice);
  *device = 70 + number;  // no number that a caller may know
  return kOk;
}
API cuDeviceGetName(char* name, int room, int device) {
  BEGIN("DeviceGetName", false)
  if (device < 70 || room < 8) return Wrong("cuDeviceGetName", kInvalidDevice);
  std::strcpy(name, "stub");
  return kOk;
}
API cuDeviceGetUuid_v2(char* uuid, int device) {
  BEGIN("DeviceGetUuid", false)
  if (device < 70) return Wrong("cuDeviceGetUuid", kInvalidDevice);
  std::memset(uuid, device, 16);
  return kOk;
}
API cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("DeviceGetAttribute", false)
  if (device < 70) return Wrong("cuDeviceGetAttribute", kInvalidDevice);
  const int capability = static_cast<int>(Fact("capability", 90));
  switch (attribute) {
    case 1: *value = static_cast<int>(Fact("items", 1024)); return kOk;
    case 8: *value = 49152; return kOk;
    case 16: *value = 132; return kOk;
    case 75: *value = capability / 10; return kOk;
    case 76: *value = capability % 10; return kOk;
  }
  return Wrong("an attribute that the stub does not know");
}
API cuDeviceTotalMem_v2(size_t* bytes, int device) {
  BEGIN("DeviceTotalMem", false)
  if (device < 70) return Wrong("cuDeviceTotalMem", kInvalidDevice);
  *bytes = static_cast<size_t>(Fact("memory", 1ll << 34));
  return kOk;
}
API cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN("PrimaryCtxRetain", false)
  if (device < 70) return Wrong("cuDevicePrimaryCtxRetain", kInvalidDevice);
  ++world().retained;
  *context = &g_context;
  return kOk;
}
API cuDevicePrimaryCtxRelease_v2(int) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return --world().retained < 0 ? Wrong("a context is released twice") : static_cast<int>(kOk);
}
API cuCtxPushCurrent_v2(void* context) {
  BEGIN("CtxPushCurrent", false)
  if (context != &g_context || world().retained < 1) return Wrong("cuCtxPushCurrent of no context", kInvalidContext);
  t_contexts.push_back(context);
  return kOk;
}
API cuCtxPopCurrent_v2(void** context) {
  if (t_contexts.empty()) return Wrong("cuCtxPopCurrent of nothing", kInvalidContext);
  *context = t_contexts.back();
  t_contexts.pop_back();
  return kOk;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN("MemGetInfo", true)
  *total = static_cast<size_t>(Fact("memory", 1ll << 34));
  const size_t taken = world().taken() + static_cast<size_t>(Fact("others", 0));
  *free = *total - std::min(taken, *total);
  return kOk;
}
API cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  BEGIN("MemAlloc", true)
  if (!bytes) return Wrong("cuMemAlloc of nothing");
  if (world().captures) return Wrong("cuMemAlloc while a stream is captured");
  World& w = world();
  if (w.taken() + bytes > static_cast<size_t>(Fact("memory", 1ll << 34))) return kNoMemory;
  char* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(memory, 0xAB, bytes);  // nobody may rely on zeros
  w.memory[memory] = bytes;
  *out = reinterpret_cast<uint64_t>(memory);
  return kOk;
}
API cuMemFree_v2(uint64_t at) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const auto found = world().memory.find(static_cast<char*>(Of(at)));
  if (found == world().memory.end()) return Wrong("cuMemFree of no memory");
  if (Used(found->first, found->second)) Wrong("memory is freed while a stream uses it");
  world().memory.erase(found);
  std::free(Of(at));
  return world().lost;
}
API cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
  BEGIN("MemHostAlloc", true)
  if (!bytes || flags > 7) return Wrong("cuMemHostAlloc of nothing");
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);  // as pages lie
  std::memset(*out, 0xCD, bytes);
  world().pinned[static_cast<char*>(*out)] = bytes;
  return kOk;
}
API cuMemFreeHost(void* at) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const auto found = world().pinned.find(static_cast<char*>(at));
  if (found == world().pinned.end()) return Wrong("cuMemFreeHost of no memory");
  if (Used(found->first, found->second)) Wrong("pinned memory is freed while a stream uses it");
  world().pinned.erase(found);
  std::free(at);
  return world().lost;
}
API cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) {
  BEGIN("MemHostGetDevicePointer", true)
  if (flags || !world().pinned.count(static_cast<char*>(at))) return Wrong("cuMemHostGetDevicePointer of no memory");
  *out = reinterpret_cast<uint64_t>(at);
  return kOk;
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  BEGIN("MemcpyToDevice", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemcpyHtoDAsync");
  if (!s) return kInvalidHandle;
  if (!Inside(world().memory, Of(to), bytes)) return Wrong("a copy to no memory of the GPU");
  if (!Inside(world().pinned, from, bytes)) return Wrong("a copy from memory that is not pinned");
  return Add(s, {Of(to), from}, [=] { std::memcpy(Of(to), from, bytes); });
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  BEGIN("MemcpyToHost", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemcpyDtoHAsync");
  if (!s) return kInvalidHandle;
  if (!Inside(world().memory, Of(from), bytes)) return Wrong("a copy from no memory of the GPU");
  return Add(s, {to, Of(from)}, [=] { std::memcpy(to, Of(from), bytes); });
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  BEGIN("MemcpyOnDevice", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemcpyDtoDAsync");
  if (!s) return kInvalidHandle;
  if (!Inside(world().memory, Of(to), bytes) || !Inside(world().memory, Of(from), bytes)) {
    return Wrong("a copy outside of the GPU's memory");
  }
  return Add(s, {Of(to), Of(from)}, [=] { std::memmove(Of(to), Of(from), bytes); });
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  BEGIN("Memcpy", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemcpyAsync");
  if (!s) return kInvalidHandle;
  for (const uint64_t at : {to, from}) {
    if (!Inside(world().memory, Of(at), bytes) && !Inside(world().pinned, Of(at), bytes)) {
      return Wrong("a copy of memory that is neither the GPU's nor pinned");
    }
  }
  return Add(s, {Of(to), Of(from)}, [=] { std::memcpy(Of(to), Of(from), bytes); });
}
struct Copy2D {
  size_t from_x, from_y;
  int from_type;
  const void* from_host;
  uint64_t from;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  int to_type;
  void* to_host;
  uint64_t to;
  void* to_array;
  size_t to_pitch, width, height;
};
API cuMemcpy2DAsync_v2(const Copy2D* given, void* stream) {
  BEGIN("Memcpy2D", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemcpy2DAsync");
  if (!s) return kInvalidHandle;
  const Copy2D c = *given;
  const auto reach = [&](size_t pitch) { return (c.height - 1) * pitch + c.width; };
  if (c.from_x || c.from_y || c.to_x || c.to_y || c.from_type != 2 || c.to_type != 2 || !c.width || !c.height ||
      c.from_pitch < c.width || c.to_pitch < c.width) {
    return Wrong("a copy of rows that is none");
  }
  if (!Inside(world().memory, Of(c.from), reach(c.from_pitch)) ||
      !Inside(world().memory, Of(c.to), reach(c.to_pitch))) {
    return Wrong("a copy of rows outside of the GPU's memory");
  }
  return Add(s, {Of(c.from), Of(c.to)}, [c] {
    for (size_t row = 0; row < c.height; ++row) {
      std::memcpy(Of(c.to + row * c.to_pitch), Of(c.from + row * c.from_pitch), c.width);
    }
  });
}
API cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  BEGIN("Memset", true)
  auto* s = Alive<Stream>(stream, "stream", "cuMemsetD8Async");
  if (!s) return kInvalidHandle;
  if (!Inside(world().memory, Of(to), bytes)) return Wrong("a fill of no memory of the GPU");
  return Add(s, {Of(to)}, [=] { std::memset(Of(to), value, bytes); });
}
API cuStreamCreate(void** out, unsigned flags) {
  BEGIN("StreamCreate", true)
  if (flags != 1) return Wrong("a stream that waits for stream 0");
  *out = Make<Stream>("stream");
  return kOk;
}
API cuStreamSynchronize(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamSynchronize");
  if (s && s->captured) Wrong("cuStreamSynchronize of a stream that is captured");
  if (s) Drain(s);
  if (const int code = Begin("StreamSynchronize", true)) return code;
  return s ? int{kOk} : int{kInvalidHandle};
}
API cuStreamQuery(void* stream) {
  BEGIN("StreamQuery", true)
  auto* s = Alive<Stream>(stream, "stream", "cuStreamQuery");
  if (!s) return kInvalidHandle;
  if (s->captured) return Wrong("cuStreamQuery of a stream that is captured");
  return Proceed(s) ? int{kOk} : int{kNotReady};
}
API cuStreamBeginCapture_v2(void* stream, int mode) {
  BEGIN("StreamBeginCapture", true)
  auto* s = Alive<Stream>(stream, "stream", "cuStreamBeginCapture");
  if (!s) return kInvalidHandle;
  if (s->captured || mode != 1) return Wrong("cuStreamBeginCapture");
  s->captured = Make<Graph>("graph");
  ++world().captures;
  return kOk;
}
API cuStreamEndCapture(void* stream, void** graph) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamEndCapture");
  if (!s || !s->captured) return Wrong("cuStreamEndCapture of a stream that is not captured");
  *graph = s->captured;
  s->captured = nullptr;
  --world().captures;
  return Begin("StreamEndCapture", true);
}
API cuStreamDestroy_v2(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamDestroy");
  if (s && !s->waiting.empty()) Wrong("a stream is destroyed while it has work");
  return End<Stream>(stream, "stream", "cuStreamDestroy");
}
API cuEventCreate(void** out, unsigned flags) {
  BEGIN("EventCreate", true)
  if (flags != 2) return Wrong("an event that measures time nobody asks for");
  *out = Make<Event>("event");
  return kOk;
}
API cuEventRecord(void* event, void* stream) {
  BEGIN("EventRecord", true)
  auto* e = Alive<Event>(event, "event", "cuEventRecord");
  auto* s = Alive<Stream>(stream, "stream", "cuEventRecord");
  if (!e || !s) return kInvalidHandle;
  if (s->captured) return Wrong("cuEventRecord in a stream that is captured");
  *e = {s->added, s};
  return kOk;
}
API cuEventSynchronize(void* event) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* e = Alive<Event>(event, "event", "cuEventSynchronize");
  if (e && !e->stream) Wrong("an event is waited for that was never recorded");
  if (e && e->stream) Drain(e->stream, e->stream_end);
  if (const int code = Begin("EventSynchronize", true)) return code;
  return e ? int{kOk} : int{kInvalidHandle};
}
API cuEventQuery(void* event) {
  BEGIN("EventQuery", true)
  auto* e = Alive<Event>(event, "event", "cuEventQuery");
  if (!e) return kInvalidHandle;
  if (!e->stream) return Wrong("an event is asked for that was never recorded");
  return Proceed(e->stream, e->stream_end) ? int{kOk} : int{kNotReady};
}
API cuEventDestroy_v2(void* event) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return End<Event>(event, "event", "cuEventDestroy");
}
API cuModuleLoadDataEx(void** out, const void* image, unsigned count, int* options, void** values) {
  BEGIN("ModuleLoadData", true)
  const auto* bytes = static_cast<const unsigned char*>(image);
  const int capability = static_cast<int>(Fact("capability", 90));
  auto module = std::make_unique<Module>();
  if (!std::memcmp(bytes,
                   "\x7f"
                   "ELF",
                   4)) {
    if (count) return Wrong("options for machine code that is not built");
    if (const int code = Elf(bytes, capability, module.get())) return code;
  } else {
    // Of a compiler that stands in for nvcc: machine code is text, too.
    const auto* text = static_cast<const char*>(image);
    const bool cubin = !std::strncmp(text, "CUBIN", 5);
    const char* machine = std::strstr(text, ".target sm_");
    if (!machine) return Wrong("a module that is neither machine code nor PTX", kInvalidImage);
    const int built = std::atoi(machine + 11);
    if (built > capability || (cubin && built / 10 != capability / 10)) return Wrong("a module for others", kNoBinary);
    if (cubin && count) return Wrong("options for machine code that is not built");
    if (!cubin && (count != 2 || options[0] != 5 || options[1] != 6)) return Wrong("PTX is built without a log");
    if (!cubin && Fact("builds", 1) == 0) {
      std::strncpy(static_cast<char*>(values[0]), "line 1: no such word", reinterpret_cast<size_t>(values[1]));
      return 218;
    }
    Entries(text, module.get());
  }
  if (module->kernels.size() != 1) return Wrong("a module of " + std::to_string(module->kernels.size()) + " kernels");
  world().alive[module.get()] = "module";
  *out = module.release();
  return kOk;
}
API cuModuleUnload(void* module) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* of = Alive<Module>(module, "module", "cuModuleUnload");
  if (of) {
    for (const auto& kernel : of->kernels) {
      if (Used(kernel.get())) Wrong("a module is unloaded while a stream uses it");
      world().alive.erase(kernel.get());
    }
  }
  return End<Module>(module, "module", "cuModuleUnload");
}
API cuModuleGetFunction(void** out, void* module, const char* name) {
  BEGIN("ModuleGetFunction", true)
  auto* of = Alive<Module>(module, "module", "cuModuleGetFunction");
  if (!of) return kInvalidHandle;
  for (const auto& kernel : of->kernels) {
    if (kernel->name != name) continue;
    world().alive[kernel.get()] = "kernel";
    *out = kernel.get();
    return kOk;
  }
  return kNotFound;
}
API cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  BEGIN("LaunchKernel", true)
  auto* s = Alive<Stream>(stream, "stream", "cuLaunchKernel");
  if (!s) return kInvalidHandle;
  if (extra) return Wrong("arguments in two ways");
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  Launch launch;
  if (const int code = Take("cuLaunchKernel", Alive<Kernel>(kernel, "kernel", "cuLaunchKernel"), grid, block, shared,
                            arguments, &launch)) {
    return code;
  }
  return AddWaiting(s, Uses(launch), [=](const char* how) { return Run(launch, how), true; }, true);
}
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char room[64];
    int allowed;
  } value;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
// A kernel that may begin early needs a GPU and a driver that do so, has to wait by itself, and is behind another kernel.
API cuLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments, void** extra) {
  BEGIN("LaunchKernelEx", true)
  auto* s = Alive<Stream>(config->stream, "stream", "cuLaunchKernelEx");
  if (!s) return kInvalidHandle;
  if (extra) return Wrong("arguments in two ways");
  if (config->count != 1 || config->attributes->id != 6 || config->attributes->value.allowed != 1) {
    return Wrong("a launch with other attributes than that it may begin early");
  }
  if (Fact("capability", 90) < 90 || Fact("driver", 13000) < 12030) return Wrong("a launch of newer GPUs or drivers");
  auto* of = Alive<Kernel>(kernel, "kernel", "cuLaunchKernelEx");
  if (of && !of->awaits) return Wrong("a kernel begins early that does not wait: " + of->name);
  const bool first = s->captured ? s->captured->nodes.empty() : s->waiting.empty() && s->done == 0;
  const bool behind =
      s->captured ? !first && s->captured->nodes.back()->kernel : s->waiting.empty() || s->waiting.back().kernel;
  if (first || !behind) return Wrong("a kernel begins early that is behind no kernel: " + (of ? of->name : ""));
  Launch launch;
  if (const int code = Take("cuLaunchKernelEx", of, config->grid, config->block, config->shared, arguments, &launch)) {
    return code;
  }
  launch.early = true;
  return AddWaiting(s, Uses(launch), [=](const char* how) { return Run(launch, how), true; }, true);
}
API cuGraphCreate(void** out, unsigned flags) {
  BEGIN("GraphCreate", true)
  if (flags) return Wrong("cuGraphCreate with flags");
  *out = Make<Graph>("graph");
  return kOk;
}
API cuGraphDestroy(void* graph) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return End<Graph>(graph, "graph", "cuGraphDestroy");
}
struct NodeParams {
  void* kernel;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
};
API cuGraphAddKernelNode(void** out, void* graph, void* const* after, size_t count, const NodeParams* p) {
  BEGIN("GraphAddKernelNode", true)
  auto* of = Alive<Graph>(graph, "graph", "cuGraphAddKernelNode");
  if (!of) return kInvalidHandle;
  if (p->extra) return Wrong("arguments in two ways");
  Launch launch;
  if (const int code = Take("cuGraphAddKernelNode", Alive<Kernel>(p->kernel, "kernel", "cuGraphAddKernelNode"), p->grid,
                            p->block, p->shared, p->arguments, &launch)) {
    return code;
  }
  auto node = std::make_unique<Operation>();
  node->uses = Uses(launch);
  node->work = [=](const char* how) { return Run(launch, how), true; };
  // Each behind the one before it: no kernel reads what another one still writes.
  const bool chained = of->nodes.empty() ? count == 0 : count == 1 && after[0] == of->nodes.back().get();
  if (!chained) return Wrong("a node that is not behind the one before it");
  *out = node.get();
  of->nodes.push_back(std::move(node));
  return kOk;
}
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags) {
  BEGIN("GraphInstantiate", true)
  auto* of = Alive<Graph>(graph, "graph", "cuGraphInstantiate");
  if (!of) return kInvalidHandle;
  if (flags) return Wrong("cuGraphInstantiate with flags");
  auto exec = std::make_unique<Exec>();
  for (const auto& node : of->nodes) exec->steps.push_back({node->work, node->uses, "replayed"});
  for (Operation& step : exec->steps) step.uses.push_back(exec.get());
  exec->bytes = static_cast<size_t>(Fact("graph", 1 << 20));
  world().alive[exec.get()] = "exec";
  *out = exec.release();
  return kOk;
}
API cuGraphUpload(void* exec, void* stream) {
  BEGIN("GraphUpload", true)
  auto* of = Alive<Exec>(exec, "exec", "cuGraphUpload");
  if (!of || !Alive<Stream>(stream, "stream", "cuGraphUpload")) return kInvalidHandle;
  of->uploaded = true;
  return kOk;
}
API cuGraphLaunch(void* exec, void* stream) {
  BEGIN("GraphLaunch", true)
  auto* of = Alive<Exec>(exec, "exec", "cuGraphLaunch");
  auto* s = Alive<Stream>(stream, "stream", "cuGraphLaunch");
  if (!of || !s) return kInvalidHandle;
  if (!of->uploaded) return Wrong("a graph is uploaded by its first replay");
  if (s->captured) return Wrong("a graph in a stream that is captured");
  for (const Operation& step : of->steps) s->waiting.push_back(step);
  s->added += of->steps.size();
  return kOk;
}
API cuGraphExecDestroy(void* exec) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  if (Used(exec)) Wrong("a graph is destroyed while a stream uses it");
  return End<Exec>(exec, "exec", "cuGraphExecDestroy");
}

// ---- what stub_nccl.cc asks ------------------------------------------------------------------------------------

// A GPU goes on while nobody asks for it: other processes wait for what it gathers.
void Pump() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    for (const auto& [handle, kind] : world().alive) {
      if (kind == "stream") Proceed(static_cast<Stream*>(handle));
    }
  }
}

API stub_cuda_in_context() { return t_contexts.empty() ? 0 : 1; }
// Enqueues what reads and writes memory of the GPU for a communicator; again and again, until work(context) is true.
API stub_cuda_enqueue(void* stream, const void* from, void* to, size_t read, size_t written, const void* comm,
                      bool (*work)(void*), void* context) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "a collective");
  if (!s || t_contexts.empty()) return kInvalidHandle;
  if (!Inside(world().memory, from, read) || !Inside(world().memory, to, written)) return kInvalidValue;
  static const bool pumped = (std::thread(Pump).detach(), true);
  static_cast<void>(pumped);
  return AddWaiting(s, {from, to, comm}, [=](const char*) { return work(context); });
}
// Whether a graph, or what waits in a stream, uses a communicator.
API stub_cuda_uses(const void* comm) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const auto named = [&](const Operation& one) {
    return std::find(one.uses.begin(), one.uses.end(), comm) != one.uses.end();
  };
  for (const auto& [handle, kind] : world().alive) {
    if (kind != "exec") continue;
    const auto& steps = static_cast<Exec*>(handle)->steps;
    if (std::any_of(steps.begin(), steps.end(), named)) return 1;
  }
  return Used(comm) ? 1 : 0;
}

// ---- what tests ask --------------------------------------------------------------------------------------------

// A line for each mistake of the program, and for each thing that it has not given back.
extern "C" __attribute__((visibility("default"))) const char* stub_cuda_report() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const World& w = world();
  text.clear();
  for (const std::string& line : w.wrong) text += line + "\n";
  for (const auto& [handle, kind] : w.alive) {
    if (kind != "kernel") text += "left: a " + kind + "\n";
  }
  if (!w.memory.empty()) text += "left: memory of the GPU\n";
  if (!w.pinned.empty()) text += "left: pinned memory\n";
  if (w.retained) text += "left: a context\n";
  return text.c_str();
}
// Kernels that ran since the last call, a line each: name, groups, launched or replayed, with a plus if they may begin
// early.
extern "C" __attribute__((visibility("default"))) const char* stub_cuda_launches() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  text.clear();
  for (const std::string& line : world().launched) text += line + "\n";
  world().launched.clear();
  return text.c_str();
}
// Calls that failed by chance, or as the one that was ordered to.
extern "C" __attribute__((visibility("default"))) long long stub_cuda_failed() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return world().num_failed;
}
// As if the process began anew, but for what is alive.
extern "C" __attribute__((visibility("default"))) void stub_cuda_recover() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  world().lost = 0;
  world().calls.clear();
  world().wrong.clear();
  world().launched.clear();
}
// Where the suite of device.h ends with what is left: a report on stderr, and a failure.
__attribute__((destructor)) static void AtEnd() {
  if (!std::getenv("STUB_CUDA_STRICT")) return;
  const char* text = stub_cuda_report();
  if (!*text) return;
  std::fprintf(stderr, "stub_cuda: at the end:\n%s", text);
  std::_Exit(70);
}
