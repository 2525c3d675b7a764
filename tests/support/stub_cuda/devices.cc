// A CUDA driver without a GPU, as strict as one can be: every handle, pointer, size and order is checked, and what was put
// into a stream happens as late as it may. Kernels compute nothing, unless STUB_CUDA_KERNELS names a library that has them
// for the host (cuda_on_host.py). What STUB_CUDA says, as in "MemAlloc=2 devices=0", goes wrong: a function returns a code
// (from its n-th call on: "GraphLaunch@3=700"), or a fact has another value. Calls also fail by chance, with errors that
// lose no device ("one_in=100 seed=7"), or one of all that are made since the orders changed ("only=5"). Tests ask what
// happened by the functions of asked.cc. This file has devices and contexts.
#include "world.h"

using namespace stub_cuda;

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
