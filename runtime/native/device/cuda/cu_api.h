// The part of CUDA's driver API that llmc uses, declared as in its manual. The driver is opened at run time, so neither
// its headers nor the library are needed to build llmc. No other part of CUDA is used.
#pragma once
#include <cstddef>
#include <cstdint>

namespace llmc {

using CuResult = int32_t;
using CuDeviceId = int32_t;
using CuPointer = uint64_t;  // address in memory of the device
using CuContext = struct CuContextId*;
using CuStreamHandle = struct CuStreamId*;
using CuEventHandle = struct CuEventId*;
using CuModule = struct CuModuleId*;
using CuFunction = struct CuFunctionId*;
using CuGraph = struct CuGraphId*;
using CuGraphNode = struct CuGraphNodeId*;
using CuGraphExec = struct CuGraphExecId*;

struct CuUuid {
  char bytes[16];
};

struct CuCopy2D {  // CUDA_MEMCPY2D_v2
  size_t from_x, from_y;
  int32_t from_type;
  const void* from_host;
  CuPointer from;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  int32_t to_type;
  void* to_host;
  CuPointer to;
  void* to_array;
  size_t to_pitch, width, height;  // width: in bytes
};

struct CuKernelNode {  // CUDA_KERNEL_NODE_PARAMS_v1
  CuFunction function;
  uint32_t grid[3], block[3], shared_bytes;
  void** arguments;
  void** extra;
};

struct CuLaunchAttribute {  // CUlaunchAttribute
  int32_t id;
  char pad[4];
  union {
    alignas(8) char room[64];
    int32_t allowed;  // programmaticStreamSerializationAllowed
  } value;
};

struct CuLaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  CuStreamHandle stream;
  CuLaunchAttribute* attributes;
  uint32_t num_attributes;
};

constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuOutOfMemory = 2;
constexpr CuResult kCuDeinitialized = 4;
constexpr CuResult kCuStubLibrary = 34;
constexpr CuResult kCuNewerDriver = 36;
constexpr CuResult kCuDeviceUnavailable = 46;
constexpr CuResult kCuNoDevice = 100;
constexpr CuResult kCuInvalidDevice = 101;
constexpr CuResult kCuInvalidImage = 200;
constexpr CuResult kCuInvalidContext = 201;
constexpr CuResult kCuNoBinaryForGpu = 209;
constexpr CuResult kCuEccUncorrectable = 214;
constexpr CuResult kCuContextInUse = 216;
constexpr CuResult kCuInvalidPtx = 218;
constexpr CuResult kCuNvlinkUncorrectable = 220;
constexpr CuResult kCuJitCompilerNotFound = 221;
constexpr CuResult kCuUnsupportedPtxVersion = 222;
constexpr CuResult kCuJitDisabled = 223;
constexpr CuResult kCuContained = 226;
constexpr CuResult kCuNotFound = 500;
constexpr CuResult kCuNotReady = 600;
constexpr CuResult kCuIllegalAddress = 700;
constexpr CuResult kCuLaunchOutOfResources = 701;
constexpr CuResult kCuLaunchTimeout = 702;
constexpr CuResult kCuContextIsDestroyed = 709;
constexpr CuResult kCuAssert = 710;
constexpr CuResult kCuHardwareStackError = 714;
constexpr CuResult kCuIllegalInstruction = 715;
constexpr CuResult kCuMisalignedAddress = 716;
constexpr CuResult kCuInvalidAddressSpace = 717;
constexpr CuResult kCuInvalidPc = 718;
constexpr CuResult kCuLaunchFailed = 719;
constexpr CuResult kCuSystemNotReady = 802;
constexpr CuResult kCuDriverMismatch = 803;
constexpr CuResult kCuCompatNotSupported = 804;
constexpr CuResult kCuMpsClientTerminated = 810;
constexpr CuResult kCuUnknown = 999;

// Attributes of a device.
constexpr int32_t kCuMaxThreadsPerBlock = 1;
constexpr int32_t kCuSharedBytesPerBlock = 8;
constexpr int32_t kCuMultiprocessors = 16;
constexpr int32_t kCuCapabilityMajor = 75;
constexpr int32_t kCuCapabilityMinor = 76;

constexpr uint32_t kCuStreamNonBlocking = 1;
constexpr uint32_t kCuEventDisableTiming = 2;
constexpr uint32_t kCuWaitDefault = 0;
constexpr int32_t kCuMemoryOfDevice = 2;
constexpr int32_t kCuProgrammaticSerialization = 6;  // attribute of a launch
constexpr int32_t kCuCaptureThreadLocal = 1;  // what other threads do does not disturb a capture
// Options for building PTX.
constexpr int32_t kCuJitErrorLog = 5;
constexpr int32_t kCuJitErrorLogBytes = 6;

// Every function that a driver must have: its name here, its symbol, its arguments. All are in CUDA 11.4.
#define LLMC_CU_FUNCTIONS(X)                                                                                   \
  X(Init, "cuInit", (uint32_t))                                                                                \
  X(DriverGetVersion, "cuDriverGetVersion", (int32_t*))                                                        \
  X(GetErrorName, "cuGetErrorName", (CuResult, const char**))                                                  \
  X(DeviceGetCount, "cuDeviceGetCount", (int32_t*))                                                            \
  X(DeviceGet, "cuDeviceGet", (CuDeviceId*, int32_t))                                                          \
  X(DeviceGetName, "cuDeviceGetName", (char*, int32_t, CuDeviceId))                                            \
  X(DeviceGetUuid, "cuDeviceGetUuid_v2", (CuUuid*, CuDeviceId))                                                \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int32_t*, int32_t, CuDeviceId))                               \
  X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, CuDeviceId))                                              \
  X(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CuContext*, CuDeviceId))                                    \
  X(PrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CuDeviceId))                                           \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", (CuContext))                                                        \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", (CuContext*))                                                         \
  X(MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                                                         \
  X(MemAlloc, "cuMemAlloc_v2", (CuPointer*, size_t))                                                           \
  X(MemFree, "cuMemFree_v2", (CuPointer))                                                                      \
  X(MemHostAlloc, "cuMemHostAlloc", (void**, size_t, uint32_t))                                                \
  X(MemFreeHost, "cuMemFreeHost", (void*))                                                                     \
  X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (CuPointer*, void*, uint32_t))                    \
  X(MemcpyToDevice, "cuMemcpyHtoDAsync_v2", (CuPointer, const void*, size_t, CuStreamHandle))                  \
  X(MemcpyToHost, "cuMemcpyDtoHAsync_v2", (void*, CuPointer, size_t, CuStreamHandle))                          \
  X(MemcpyOnDevice, "cuMemcpyDtoDAsync_v2", (CuPointer, CuPointer, size_t, CuStreamHandle))                    \
  X(Memcpy, "cuMemcpyAsync", (CuPointer, CuPointer, size_t, CuStreamHandle))                                   \
  X(Memcpy2D, "cuMemcpy2DAsync_v2", (const CuCopy2D*, CuStreamHandle))                                         \
  X(Memset, "cuMemsetD8Async", (CuPointer, uint8_t, size_t, CuStreamHandle))                                   \
  X(StreamCreate, "cuStreamCreate", (CuStreamHandle*, uint32_t))                                               \
  X(StreamSynchronize, "cuStreamSynchronize", (CuStreamHandle))                                                \
  X(StreamQuery, "cuStreamQuery", (CuStreamHandle))                                                            \
  X(StreamWaitEvent, "cuStreamWaitEvent", (CuStreamHandle, CuEventHandle, uint32_t))                           \
  X(StreamBeginCapture, "cuStreamBeginCapture_v2", (CuStreamHandle, int32_t))                                  \
  X(StreamEndCapture, "cuStreamEndCapture", (CuStreamHandle, CuGraph*))                                        \
  X(StreamDestroy, "cuStreamDestroy_v2", (CuStreamHandle))                                                     \
  X(EventCreate, "cuEventCreate", (CuEventHandle*, uint32_t))                                                  \
  X(EventRecord, "cuEventRecord", (CuEventHandle, CuStreamHandle))                                             \
  X(EventSynchronize, "cuEventSynchronize", (CuEventHandle))                                                   \
  X(EventQuery, "cuEventQuery", (CuEventHandle))                                                               \
  X(EventDestroy, "cuEventDestroy_v2", (CuEventHandle))                                                        \
  X(ModuleLoadData, "cuModuleLoadDataEx", (CuModule*, const void*, uint32_t, int32_t*, void**))                \
  X(ModuleUnload, "cuModuleUnload", (CuModule))                                                                \
  X(ModuleGetFunction, "cuModuleGetFunction", (CuFunction*, CuModule, const char*))                            \
  X(LaunchKernel, "cuLaunchKernel",                                                                            \
    (CuFunction, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, CuStreamHandle, void**, \
     void**))                                                                                                  \
  X(GraphCreate, "cuGraphCreate", (CuGraph*, uint32_t))                                                        \
  X(GraphDestroy, "cuGraphDestroy", (CuGraph))                                                                 \
  X(GraphAddKernelNode, "cuGraphAddKernelNode",                                                                \
    (CuGraphNode*, CuGraph, const CuGraphNode*, size_t, const CuKernelNode*))                                  \
  X(GraphInstantiate, "cuGraphInstantiateWithFlags", (CuGraphExec*, CuGraph, unsigned long long))              \
  X(GraphUpload, "cuGraphUpload", (CuGraphExec, CuStreamHandle))                                               \
  X(GraphLaunch, "cuGraphLaunch", (CuGraphExec, CuStreamHandle))                                               \
  X(GraphExecDestroy, "cuGraphExecDestroy", (CuGraphExec))

// Functions that a driver may lack.
#define LLMC_CU_NEWER_FUNCTIONS(X) \
  X(LaunchKernelEx, "cuLaunchKernelEx", (const CuLaunchConfig*, CuFunction, void**, void**))

struct CuFunctions {
#define LLMC_CU_MEMBER(name, symbol, arguments) CuResult(*name) arguments = nullptr;
  LLMC_CU_FUNCTIONS(LLMC_CU_MEMBER)
  LLMC_CU_NEWER_FUNCTIONS(LLMC_CU_MEMBER)
#undef LLMC_CU_MEMBER
};

}  // namespace llmc
