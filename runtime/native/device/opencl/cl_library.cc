#include "device/opencl/cl_library.h"

#include <dlfcn.h>

namespace llmc {
namespace {

struct ErrorName {
  cl_int code;
  const char* name;
};

constexpr ErrorName kNames[] = {
    {kClDeviceNotFound, "no such device"},
    {kClDeviceNotAvailable, "the device is not available"},
    {kClMemObjectAllocationFailure, "the device has no memory left"},
    {kClOutOfResources, "the device is out of resources"},
    {kClOutOfHostMemory, "the host has no memory left"},
    {kClBuildProgramFailure, "the program does not build"},
    {kClExecStatusErrorForEventsInWaitList, "a command failed on the device"},
    {kClInvalidBinary, "the binary is not one of this device"},
    {kClInvalidBufferSize, "the device takes no buffer of this size"},
    {kClPlatformNotFound, "no driver is installed"},
};

}  // namespace

Status ClLibrary::Load(const std::string& path, std::shared_ptr<const ClLibrary>* out) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status::Error(LLMC_ERR_NOT_FOUND,
                         std::string("OpenCL cannot be loaded (") + (why != nullptr ? why : "unknown error") +
                             "); install an OpenCL loader and a driver, or name one with library=.");
  }
  auto loaded = std::make_shared<ClLibrary>();
  const char* missing = nullptr;
#define LLMC_CL_FIND(result, name, arguments)                                                    \
  loaded->functions_.name = reinterpret_cast<result(*) arguments>(::dlsym(library, "cl" #name)); \
  if (loaded->functions_.name == nullptr && missing == nullptr) missing = "cl" #name;
  LLMC_CL_FUNCTIONS(LLMC_CL_FIND)
#undef LLMC_CL_FIND
  if (missing != nullptr) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "The library " + path +
                                                 " is not a loader of OpenCL 1.2 or later: it has no " + missing +
                                                 "; install another one.");
  }
  *out = std::move(loaded);
  return Status::Ok();
}

std::string ClErrorName(cl_int code) {
  for (const ErrorName& one : kNames) {
    if (one.code == code) return one.name + std::string(" (") + std::to_string(code) + ")";
  }
  return "OpenCL error " + std::to_string(code);
}

Status ClError(const std::string& doing, cl_int code) {
  switch (code) {
    case kClMemObjectAllocationFailure:
    case kClOutOfResources:
    case kClOutOfHostMemory:
    case kClInvalidBufferSize:
      return Status::Error(LLMC_ERR_OUT_OF_MEMORY, doing + " failed: " + ClErrorName(code) +
                                                       "; lower --gpu-memory-utilization, compile fewer or smaller "
                                                       "buckets, or choose another device.");
    case kClDeviceNotFound:
    case kClPlatformNotFound: return Status::Error(LLMC_ERR_NOT_FOUND, doing + " failed: " + ClErrorName(code) + ".");
    case kClDeviceNotAvailable:
      return Status::Error(LLMC_ERR_DEVICE_FAILED, doing + " failed: " + ClErrorName(code) +
                                                       "; wait for whoever has it, or choose another device.");
    default:
      return Status::Error(LLMC_ERR_DEVICE_FAILED,
                           doing + " failed: " + ClErrorName(code) + "; if it fails again, look at the driver's log.");
  }
}

}  // namespace llmc
