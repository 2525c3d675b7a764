#include "device/cuda/cu_library.h"

#include <dlfcn.h>

#include <algorithm>

namespace llmc {
namespace {

struct CuName {
  CuResult code;
  const char* name;
};

constexpr CuName kCuNames[] = {
    {kCuOutOfMemory, "the GPU has no memory left"},
    {kCuStubLibrary, "the library is a placeholder for building and no driver"},
    {kCuNewerDriver, "the driver is too old"},
    {kCuDeviceUnavailable, "another process has the GPU for itself"},
    {kCuNoDevice, "the driver finds no GPU"},
    {kCuInvalidDevice, "there is no such GPU"},
    {kCuInvalidImage, "the code is damaged"},
    {kCuNoBinaryForGpu, "the code is for another architecture"},
    {kCuEccUncorrectable, "the GPU's memory has an error that cannot be corrected"},
    {kCuContextInUse, "another process has the GPU for itself"},
    {kCuInvalidPtx, "the driver cannot build the code"},
    {kCuJitCompilerNotFound, "the driver lacks its compiler of PTX"},
    {kCuUnsupportedPtxVersion, "the code is newer than the driver"},
    {kCuJitDisabled, "building PTX is switched off"},
    {kCuIllegalAddress, "a kernel used an address that is not its own"},
    {kCuLaunchOutOfResources, "a kernel needs more than the GPU has"},
    {kCuLaunchTimeout, "a kernel ran too long"},
    {kCuLaunchFailed, "a kernel failed"},
    {kCuSystemNotReady, "the system's GPUs are not ready"},
    {kCuDriverMismatch, "library and kernel module of the driver are of different versions"},
    {kCuCompatNotSupported, "this GPU does not support the compatibility library"},
};
// Errors that lose the context: every later call returns the same one.
constexpr CuResult kCuLosing[] = {kCuDeinitialized,
                                  kCuInvalidContext,
                                  kCuEccUncorrectable,
                                  kCuNvlinkUncorrectable,
                                  kCuContained,
                                  kCuIllegalAddress,
                                  kCuLaunchTimeout,
                                  kCuContextIsDestroyed,
                                  kCuAssert,
                                  kCuHardwareStackError,
                                  kCuIllegalInstruction,
                                  kCuMisalignedAddress,
                                  kCuInvalidAddressSpace,
                                  kCuInvalidPc,
                                  kCuLaunchFailed,
                                  kCuMpsClientTerminated,
                                  kCuUnknown};

}  // namespace

Status CuLibrary::Load(const std::string& path, std::shared_ptr<const CuLibrary>* out) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status::Error(
        LLMC_ERR_NOT_FOUND,
        std::string("The CUDA driver cannot be loaded (") + (why != nullptr ? why : "unknown error") +
            "); install NVIDIA's driver, give a container its GPUs, or name the library with library=.");
  }
  auto loaded = std::make_shared<CuLibrary>();
  const char* missing = nullptr;
#define LLMC_CU_FIND(name, symbol, arguments)                                                  \
  loaded->functions_.name = reinterpret_cast<CuResult(*) arguments>(::dlsym(library, symbol)); \
  if (loaded->functions_.name == nullptr && missing == nullptr) missing = symbol;
  LLMC_CU_FUNCTIONS(LLMC_CU_FIND)
#undef LLMC_CU_FIND
#define LLMC_CU_FIND_NEWER(name, symbol, arguments) \
  loaded->functions_.name = reinterpret_cast<CuResult(*) arguments>(::dlsym(library, symbol));
  LLMC_CU_NEWER_FUNCTIONS(LLMC_CU_FIND_NEWER)
#undef LLMC_CU_FIND_NEWER
  if (missing != nullptr) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "The library " + path +
                                                 " is not a driver of CUDA 11.4 or later: it has no " + missing +
                                                 "; install a newer driver.");
  }
  *out = std::move(loaded);
  return Status::Ok();
}

std::string CuLibrary::ErrorName(CuResult code) const {
  const std::string number = " (CUDA error " + std::to_string(code) + ")";
  for (const CuName& one : kCuNames) {
    if (one.code == code) return one.name + number;
  }
  const char* name = nullptr;
  if (functions_.GetErrorName(code, &name) == kCuSuccess && name != nullptr) return name + number;
  return "unknown error" + number;
}

bool LosesDevice(CuResult code) {
  return std::find(std::begin(kCuLosing), std::end(kCuLosing), code) != std::end(kCuLosing);
}

Status CuError(const CuLibrary& cuda, const std::string& doing, CuResult code) {
  const auto failed = [&](llmc_status status, const char* what_to_do) {
    return Status::Error(status, doing + " failed: " + cuda.ErrorName(code) + what_to_do);
  };
  switch (code) {
    case kCuOutOfMemory:
    case kCuLaunchOutOfResources:
      return failed(LLMC_ERR_OUT_OF_MEMORY,
                    "; lower --gpu-memory-utilization, compile fewer or smaller buckets, keep weights on the host by "
                    "--cpu-offload-gib, or choose another GPU.");
    case kCuDeviceUnavailable:
    case kCuContextInUse:
      return failed(LLMC_ERR_NOT_FOUND, "; stop that process, or choose another GPU by its number.");
    case kCuStubLibrary:
    case kCuNoDevice:
    case kCuSystemNotReady:
      return failed(LLMC_ERR_NOT_FOUND,
                    "; check that nvidia-smi lists it, and that this process or container may use it.");
    case kCuDriverMismatch:
    case kCuCompatNotSupported:
    case kCuNewerDriver: return failed(LLMC_ERR_NOT_FOUND, "; update the driver, and restart the machine.");
    case kCuUnsupportedPtxVersion:
    case kCuJitCompilerNotFound:
    case kCuJitDisabled:
    case kCuInvalidPtx:
    case kCuNoBinaryForGpu:
    case kCuInvalidImage:
      return failed(LLMC_ERR_UNSUPPORTED_TARGET, "; update the driver, or compile the model for this GPU.");
    default: break;
  }
  if (LosesDevice(code)) {
    return failed(LLMC_ERR_DEVICE_LOST, "; the GPU is lost to this process: restart it, and look at the kernel's log.");
  }
  return failed(LLMC_ERR_DEVICE_FAILED, "; if it fails again, look at the driver's log.");
}

}  // namespace llmc
