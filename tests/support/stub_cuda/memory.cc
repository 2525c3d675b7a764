// Memory and copies.
#include <algorithm>

#include "streams.h"

using namespace stub_cuda;

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
