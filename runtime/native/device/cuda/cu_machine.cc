#include "device/cuda/cu_machine.h"

#include <optional>
#include <thread>
#include <utility>

#include "core/call_within.h"
#include "device/cuda/cu_code.h"

namespace llmc {
namespace {

constexpr std::chrono::microseconds kProbePause{50};
constexpr uint32_t kEarlyCapability = 90;
constexpr int32_t kEarlyDriver = 12030;  // CUDA 12.3, whose graphs have such edges

std::string VersionText(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

CuMachine::~CuMachine() {
  if (context_ == nullptr) return;
  {
    const CuScope scope(*this);
    if (probe_ != nullptr) (*this)->EventDestroy(probe_);
    if (probe_stream_ != nullptr) (*this)->StreamDestroy(probe_stream_);
  }
  (*this)->PrimaryCtxRelease(device_);
}

Status CuMachine::Open(const CuChoice& choice, std::shared_ptr<const CuMachine>* out) {
  CuApi api;
  LLMC_RETURN_IF_ERROR(CuLibrary::Load(choice.library, &api));
  std::shared_ptr<CuMachine> machine(new CuMachine(std::move(api)));
  LLMC_RETURN_IF_ERROR(machine->Choose(choice));
  LLMC_RETURN_IF_ERROR(machine->Describe());
  const std::string doing = "Opening the GPU '" + machine->name_ + "'";
  LLMC_RETURN_IF_ERROR(
      machine->Check(doing.c_str(), (*machine)->PrimaryCtxRetain(&machine->context_, machine->device_)));
  LLMC_RETURN_IF_ERROR(machine->MakeProbe());
  *out = std::move(machine);
  return Status::Ok();
}

Status CuMachine::Choose(const CuChoice& choice) {
  const CuMachine& cuda = *this;
  LLMC_RETURN_IF_ERROR(Check("Starting the CUDA driver", cuda->Init(0)));
  int32_t count = 0;
  LLMC_RETURN_IF_ERROR(Check("Counting GPUs", cuda->DeviceGetCount(&count)));
  if (count == 0) return Check("Looking for a GPU", kCuNoDevice);
  const auto there = static_cast<uint32_t>(count);
  const uint32_t wanted = choice.device != UINT32_MAX ? choice.device : choice.local_rank % there;
  if (wanted >= there) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "There is no GPU number " + std::to_string(wanted) +
                                                 "; this process may use numbers 0 … " + std::to_string(count - 1) +
                                                 " (CUDA_VISIBLE_DEVICES decides which).");
  }
  number_ = wanted;
  return Check("Choosing a GPU", cuda->DeviceGet(&device_, static_cast<int32_t>(wanted)));
}

Status CuMachine::Describe() {
  const CuMachine& cuda = *this;
  char name[256] = "";
  LLMC_RETURN_IF_ERROR(Check("Asking for a GPU's name", cuda->DeviceGetName(name, sizeof(name) - 1, device_)));
  name_ = name;
  const auto number = [&](int32_t attribute, int32_t* out) {
    return Check("Asking what a GPU has", cuda->DeviceGetAttribute(out, attribute, device_));
  };
  int32_t major = 0, minor = 0, items = 0, shared = 0, units = 0;
  LLMC_RETURN_IF_ERROR(number(kCuCapabilityMajor, &major));
  LLMC_RETURN_IF_ERROR(number(kCuCapabilityMinor, &minor));
  LLMC_RETURN_IF_ERROR(number(kCuMaxThreadsPerBlock, &items));
  LLMC_RETURN_IF_ERROR(number(kCuSharedBytesPerBlock, &shared));
  LLMC_RETURN_IF_ERROR(number(kCuMultiprocessors, &units));
  LLMC_RETURN_IF_ERROR(Check("Asking for the driver's version", cuda->DriverGetVersion(&driver_)));
  size_t bytes = 0;
  LLMC_RETURN_IF_ERROR(Check("Asking for a GPU's memory", cuda->DeviceTotalMem(&bytes, device_)));
  capability_ = static_cast<uint32_t>(10 * major + minor);
  group_items_ = static_cast<uint64_t>(items);
  shared_bytes_ = static_cast<uint64_t>(shared);
  multiprocessors_ = static_cast<uint64_t>(units);
  memory_bytes_ = bytes;
  return Status::Ok();
}

bool CuMachine::launches_early() const {
  return capability_ >= kEarlyCapability && driver_ >= kEarlyDriver && (*this)->LaunchKernelEx != nullptr;
}

Status CuMachine::Identify(CuUuid* out) const {
  return Check("Asking for a GPU's identity", (*this)->DeviceGetUuid(out, device_));
}

Status CuMachine::FreeBytes(uint64_t* out) const {
  size_t free = 0, total = 0;
  LLMC_RETURN_IF_ERROR(Check("Asking for free memory of the GPU", (*this)->MemGetInfo(&free, &total)));
  *out = free;
  return Status::Ok();
}

Status CuMachine::Check(const char* doing, CuResult code) const {
  if (code == kCuSuccess) return Status::Ok();
  CuResult none = kCuSuccess;
  if (LosesDevice(code)) lost_.compare_exchange_strong(none, code);
  return CuError(*api_, doing, code);
}

Status CuMachine::MakeProbe() {
  const CuScope scope(*this);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(Check("Opening a stream", (*this)->StreamCreate(&probe_stream_, kCuStreamNonBlocking)));
  return Check("Making an event", (*this)->EventCreate(&probe_, kCuEventDisableTiming));
}

CuResult CuMachine::Answer(std::chrono::nanoseconds most) const {
  const CuScope scope(*this);
  if (!scope.status().ok()) return lost_;
  const auto end = std::chrono::steady_clock::now() + most;
  CuResult code = (*this)->EventRecord(probe_, probe_stream_);
  if (code != kCuSuccess) return code;
  while ((code = (*this)->EventQuery(probe_)) == kCuNotReady && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kProbePause);
  }
  return code;
}

Status CuMachine::AskAlive(std::chrono::nanoseconds most) const {
  LLMC_RETURN_IF_ERROR(CheckAlive());
  // A call that never returns keeps the machine. Any other one has let go of it when its answer is there.
  const auto ask = [kept = shared_from_this(), most]() mutable {
    const std::shared_ptr<const CuMachine> machine = std::move(kept);
    return machine->Answer(most);
  };
  const std::optional<CuResult> code = CallWithin(most, ask);
  // An error that does not lose the device is an answer, too.
  if (code && LosesDevice(*code)) return Check("Asking the idle GPU for a sign of life", *code);
  silent_ = !code || *code == kCuNotReady;
  return CheckAlive();
}

Status CuMachine::CheckAlive() const {
  if (silent_) {
    return Status::Error(LLMC_ERR_DEVICE_LOST, "The GPU '" + name_ +
                                                   "' does not answer while nothing runs; the GPU is lost to this "
                                                   "process: restart it, and look at the kernel's log.");
  }
  const CuResult code = lost_.load();
  return code == kCuSuccess ? Status::Ok() : CuError(*api_, "An earlier step on '" + name_ + "'", code);
}

std::vector<std::pair<std::string, std::string>> CuMachine::Facts() const {
  const CuScope scope(*this);
  uint64_t free = 0;
  const bool known = scope.status().ok() && FreeBytes(&free).ok();
  const uint32_t named = CuCode::NamedFor(capability_);
  return {{"level", std::to_string(kMaxCuLevel)},
          {"device", name_},
          {"number", std::to_string(number_)},
          {"target",
           named == 0 ? "none, for no kernels are written for GPUs before sm_80" : "cuda:sm_" + std::to_string(named)},
          {"compute_capability", std::to_string(capability_ / 10) + "." + std::to_string(capability_ % 10)},
          {"driver", VersionText(driver_)},
          {"multiprocessors", std::to_string(multiprocessors_)},
          {"memory_bytes", std::to_string(memory_bytes_)},
          {"free_memory_bytes", known ? std::to_string(free) : "unknown"},
          {"shared_memory_bytes", std::to_string(shared_bytes_)}};
}

}  // namespace llmc
