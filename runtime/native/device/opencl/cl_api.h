// The part of OpenCL that llmc uses, declared as in the OpenCL 3.0 specification. The library is opened at run time, so
// neither its headers nor the library are needed to build llmc.
#pragma once
#include <cstddef>
#include <cstdint>

namespace llmc {

using cl_int = int32_t;
using cl_uint = uint32_t;
using cl_ulong = uint64_t;
using cl_bool = cl_uint;
using cl_bitfield = cl_ulong;
using cl_properties = intptr_t;
using cl_platform_id = struct ClPlatformId*;
using cl_device_id = struct ClDeviceId*;
using cl_context = struct ClContextId*;
using cl_command_queue = struct ClQueueId*;
using cl_mem = struct ClMemId*;
using cl_program = struct ClProgramId*;
using cl_kernel = struct ClKernelId*;
using cl_event = struct ClEventId*;
using cl_command_buffer = struct ClCommandBufferId*;

constexpr cl_int kClSuccess = 0;
constexpr cl_int kClDeviceNotFound = -1;
constexpr cl_int kClDeviceNotAvailable = -2;
constexpr cl_int kClMemObjectAllocationFailure = -4;
constexpr cl_int kClOutOfResources = -5;
constexpr cl_int kClOutOfHostMemory = -6;
constexpr cl_int kClBuildProgramFailure = -11;
constexpr cl_int kClExecStatusErrorForEventsInWaitList = -14;
constexpr cl_int kClInvalidBinary = -42;
constexpr cl_int kClInvalidBufferSize = -61;
constexpr cl_int kClPlatformNotFound = -1001;

constexpr cl_bool kClFalse = 0;
constexpr cl_bool kClTrue = 1;
constexpr cl_bitfield kClDeviceTypeCpu = 1 << 1;
constexpr cl_bitfield kClDeviceTypeGpu = 1 << 2;
constexpr cl_bitfield kClDeviceTypeAll = 0xFFFFFFFF;
constexpr cl_bitfield kClMemReadWrite = 1 << 0;
constexpr cl_bitfield kClMemReadOnly = 1 << 2;
constexpr cl_bitfield kClFpCorrectlyRoundedDivideSqrt = 1 << 7;

constexpr cl_uint kClPlatformVersion = 0x0901;
constexpr cl_uint kClPlatformName = 0x0902;
constexpr cl_uint kClDeviceType = 0x1000;
constexpr cl_uint kClDeviceMaxComputeUnits = 0x1002;
constexpr cl_uint kClDeviceMaxWorkGroupSize = 0x1004;
constexpr cl_uint kClDeviceMaxMemAllocSize = 0x1010;
constexpr cl_uint kClDeviceSingleFpConfig = 0x101B;
constexpr cl_uint kClDeviceGlobalMemSize = 0x101F;
constexpr cl_uint kClDeviceLocalMemSize = 0x1023;
constexpr cl_uint kClDeviceAvailable = 0x1027;
constexpr cl_uint kClDeviceHostUnifiedMemory = 0x1035;
constexpr cl_uint kClDeviceName = 0x102B;
constexpr cl_uint kClDriverVersion = 0x102D;
constexpr cl_uint kClDeviceVersion = 0x102F;
constexpr cl_uint kClDeviceExtensions = 0x1030;
constexpr cl_bitfield kClMemAllocHostPtr = 1 << 4;
constexpr cl_uint kClDeviceDoubleFpConfig = 0x1032;
constexpr cl_uint kClDeviceCommandBufferCapabilities = 0x12A9;
constexpr cl_bitfield kClCommandBufferCanOverlap = 1 << 2;  // CAPABILITY_SIMULTANEOUS_USE
constexpr cl_properties kClCommandBufferFlags = 0x1293;
constexpr cl_properties kClCommandBufferOverlaps = 1 << 0;  // SIMULTANEOUS_USE
constexpr cl_uint kClProgramBinarySizes = 0x1165;
constexpr cl_uint kClProgramBinaries = 0x1166;
constexpr cl_uint kClProgramBuildLog = 0x1183;
constexpr cl_uint kClKernelWorkGroupSize = 0x11B0;
constexpr cl_uint kClKernelMaxSubGroupSizeForNdrange = 0x2033;
constexpr cl_uint kClDeviceSubGroupSizesIntel = 0x4108;

// Every function that a library must have: name without "cl", and arguments. All are in OpenCL 1.2.
#define LLMC_CL_FUNCTIONS(X)                                                                                           \
  X(cl_int, GetPlatformIDs, (cl_uint, cl_platform_id*, cl_uint*))                                                      \
  X(cl_int, GetPlatformInfo, (cl_platform_id, cl_uint, size_t, void*, size_t*))                                        \
  X(cl_int, GetDeviceIDs, (cl_platform_id, cl_bitfield, cl_uint, cl_device_id*, cl_uint*))                             \
  X(cl_int, GetDeviceInfo, (cl_device_id, cl_uint, size_t, void*, size_t*))                                            \
  X(cl_context, CreateContext,                                                                                         \
    (const cl_properties*, cl_uint, const cl_device_id*, void (*)(const char*, const void*, size_t, void*), void*,     \
     cl_int*))                                                                                                         \
  X(cl_int, ReleaseContext, (cl_context))                                                                              \
  X(cl_command_queue, CreateCommandQueue, (cl_context, cl_device_id, cl_bitfield, cl_int*))                            \
  X(cl_int, ReleaseCommandQueue, (cl_command_queue))                                                                   \
  X(cl_mem, CreateBuffer, (cl_context, cl_bitfield, size_t, void*, cl_int*))                                           \
  X(cl_int, ReleaseMemObject, (cl_mem))                                                                                \
  X(cl_program, CreateProgramWithSource, (cl_context, cl_uint, const char**, const size_t*, cl_int*))                  \
  X(cl_program, CreateProgramWithBinary,                                                                               \
    (cl_context, cl_uint, const cl_device_id*, const size_t*, const unsigned char**, cl_int*, cl_int*))                \
  X(cl_int, BuildProgram, (cl_program, cl_uint, const cl_device_id*, const char*, void (*)(cl_program, void*), void*)) \
  X(cl_int, GetProgramInfo, (cl_program, cl_uint, size_t, void*, size_t*))                                             \
  X(cl_int, GetProgramBuildInfo, (cl_program, cl_device_id, cl_uint, size_t, void*, size_t*))                          \
  X(cl_int, RetainProgram, (cl_program))                                                                               \
  X(cl_int, ReleaseProgram, (cl_program))                                                                              \
  X(cl_kernel, CreateKernel, (cl_program, const char*, cl_int*))                                                       \
  X(cl_int, ReleaseKernel, (cl_kernel))                                                                                \
  X(cl_int, SetKernelArg, (cl_kernel, cl_uint, size_t, const void*))                                                   \
  X(cl_int, GetKernelWorkGroupInfo, (cl_kernel, cl_device_id, cl_uint, size_t, void*, size_t*))                        \
  X(cl_int, EnqueueNDRangeKernel,                                                                                      \
    (cl_command_queue, cl_kernel, cl_uint, const size_t*, const size_t*, const size_t*, cl_uint, const cl_event*,      \
     cl_event*))                                                                                                       \
  X(cl_int, EnqueueWriteBuffer,                                                                                        \
    (cl_command_queue, cl_mem, cl_bool, size_t, size_t, const void*, cl_uint, const cl_event*, cl_event*))             \
  X(cl_int, EnqueueReadBuffer,                                                                                         \
    (cl_command_queue, cl_mem, cl_bool, size_t, size_t, void*, cl_uint, const cl_event*, cl_event*))                   \
  X(cl_int, EnqueueCopyBuffer,                                                                                         \
    (cl_command_queue, cl_mem, cl_mem, size_t, size_t, size_t, cl_uint, const cl_event*, cl_event*))                   \
  X(cl_int, EnqueueFillBuffer,                                                                                         \
    (cl_command_queue, cl_mem, const void*, size_t, size_t, size_t, cl_uint, const cl_event*, cl_event*))              \
  X(cl_int, EnqueueMarkerWithWaitList, (cl_command_queue, cl_uint, const cl_event*, cl_event*))                        \
  X(cl_int, WaitForEvents, (cl_uint, const cl_event*))                                                                 \
  X(cl_int, ReleaseEvent, (cl_event))                                                                                  \
  X(cl_int, Flush, (cl_command_queue))                                                                                 \
  X(cl_int, Finish, (cl_command_queue))                                                                                \
  X(void*, GetExtensionFunctionAddressForPlatform, (cl_platform_id, const char*))

// Functions of cl_khr_command_buffer, which a platform may have.
#define LLMC_CL_COMMAND_BUFFER_FUNCTIONS(X)                                                                    \
  X(cl_command_buffer, CreateCommandBuffer, (cl_uint, const cl_command_queue*, const cl_properties*, cl_int*)) \
  X(cl_int, FinalizeCommandBuffer, (cl_command_buffer))                                                        \
  X(cl_int, ReleaseCommandBuffer, (cl_command_buffer))                                                         \
  X(cl_int, EnqueueCommandBuffer,                                                                              \
    (cl_uint, cl_command_queue*, cl_command_buffer, cl_uint, const cl_event*, cl_event*))                      \
  X(cl_int, CommandNDRangeKernel,                                                                              \
    (cl_command_buffer, cl_command_queue, const void*, cl_kernel, cl_uint, const size_t*, const size_t*,       \
     const size_t*, cl_uint, const cl_uint*, cl_uint*, void**))

struct ClFunctions {
#define LLMC_CL_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
  LLMC_CL_FUNCTIONS(LLMC_CL_MEMBER)
};

struct ClCommandBufferFunctions {
  LLMC_CL_COMMAND_BUFFER_FUNCTIONS(LLMC_CL_MEMBER)
#undef LLMC_CL_MEMBER
};

}  // namespace llmc
