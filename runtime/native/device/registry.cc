#include "device/registry.h"

#include <algorithm>
#include <mutex>

#include "device/cpu/open_cpu.h"
#include "device/cuda/open_cuda.h"
#include "device/opencl/open_opencl.h"
#include "device/ranks/open_ranks.h"

namespace llmc {
namespace {

std::mutex mutex;

// The library's own kinds are named here, so that the linker keeps their object files.
std::vector<const DeviceKind*>& Kinds() {
  static std::vector<const DeviceKind*> kinds = {&kCpuKind, &kOpenClKind, &kCudaKind};
  return kinds;
}

}  // namespace

std::vector<const DeviceKind*> DeviceKinds() {
  std::lock_guard<std::mutex> lock(mutex);
  return Kinds();
}

void RegisterDeviceKind(const DeviceKind* kind) {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<const DeviceKind*>& kinds = Kinds();
  const std::string name = kind->name;
  const auto same =
      std::find_if(kinds.begin(), kinds.end(), [&](const DeviceKind* other) { return name == other->name; });
  if (same != kinds.end()) {
    *same = kind;
  } else {
    kinds.push_back(kind);
  }
}

Status OpenDeviceOf(const std::string& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out) {
  std::string known;
  for (const DeviceKind* one : DeviceKinds()) {
    if (kind == one->name) {
      return OpenRanks::Wants(options) ? OpenRanks::Open(*one, options, out) : one->open(options, out);
    }
    known += (known.empty() ? "" : ", ") + std::string(one->name);
  }
  return Status::Error(LLMC_ERR_NOT_FOUND,
                       "There is no kind of device called '" + kind + "'; this library has " + known + ".");
}

}  // namespace llmc
