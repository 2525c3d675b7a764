#include "device/opencl/cl_machine.h"

#include <chrono>
#include <cstring>
#include <optional>

#include "core/call_within.h"
#include "device/opencl/cl_text.h"

namespace llmc {
namespace {

constexpr std::chrono::seconds kMostProbeTime{60};  // steps on their way may come first

struct Found {
  cl_platform_id platform;
  cl_device_id device;
};

// A number that describes a device; 0 if the device does not tell it.
template <class T>
T Number(const ClFunctions& cl, cl_device_id device, cl_uint what) {
  T value{};
  return cl.GetDeviceInfo(device, what, sizeof(value), &value, nullptr) == kClSuccess ? value : T{};
}

template <class Ask>
std::string Text(Ask ask) {
  size_t bytes = 0;
  if (ask(size_t{0}, nullptr, &bytes) != kClSuccess || bytes == 0) return "unknown";
  std::string text(bytes, '\0');
  if (ask(bytes, text.data(), nullptr) != kClSuccess) return "unknown";
  text.resize(std::strlen(text.c_str()));
  return text;
}

std::string DeviceText(const ClFunctions& cl, cl_device_id device, cl_uint what) {
  return Text([&](size_t room, void* to, size_t* bytes) { return cl.GetDeviceInfo(device, what, room, to, bytes); });
}

Status NoDevice(const std::string& why) {
  return Status::Error(LLMC_ERR_NOT_FOUND,
                       "There is no OpenCL device: " + why + "; install the driver of your GPU, or PoCL for the CPU.");
}

}  // namespace

ClMachine::~ClMachine() {
  if (probe_ != nullptr) (*api_)->ReleaseMemObject(probe_);
  if (probe_queue_ != nullptr) (*api_)->ReleaseCommandQueue(probe_queue_);
  if (context_ != nullptr) (*api_)->ReleaseContext(context_);
}

Status ClMachine::Open(const ClChoice& choice, std::shared_ptr<const ClMachine>* out) {
  ClApi api;
  LLMC_RETURN_IF_ERROR(ClLibrary::Load(choice.library, &api));
  std::shared_ptr<ClMachine> machine(new ClMachine(std::move(api)));
  LLMC_RETURN_IF_ERROR(machine->Choose(choice));
  LLMC_RETURN_IF_ERROR(machine->Describe());
  const cl_properties properties[] = {0x1084 /* platform */, reinterpret_cast<cl_properties>(machine->platform_), 0};
  cl_int code = kClSuccess;
  machine->context_ = (*machine)->CreateContext(properties, 1, &machine->device_, nullptr, nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR("Opening the OpenCL device '" + machine->name_ + "'", code);
  LLMC_RETURN_IF_ERROR(machine->MakeProbe());
  if (machine->has_opencl3_) {
    machine->lanes_ = FindLanes(**machine->api_, machine->device_, machine->context_, machine->probe_queue_,
                                DeviceText(**machine->api_, machine->device_, kClDeviceExtensions));
  }
  *out = std::move(machine);
  return Status::Ok();
}

Status ClMachine::Choose(const ClChoice& choice) {
  const ClFunctions& cl = **api_;
  cl_uint count = 0;
  const cl_int code = cl.GetPlatformIDs(0, nullptr, &count);
  if (code == kClPlatformNotFound || (code == kClSuccess && count == 0)) return NoDevice("no driver is installed");
  LLMC_RETURN_IF_CL_ERROR("Listing OpenCL drivers", code);
  std::vector<cl_platform_id> platforms(count);
  LLMC_RETURN_IF_CL_ERROR("Listing OpenCL drivers", cl.GetPlatformIDs(count, platforms.data(), nullptr));
  std::vector<Found> all;
  for (cl_platform_id platform : platforms) {
    if (cl.GetDeviceIDs(platform, kClDeviceTypeAll, 0, nullptr, &count) != kClSuccess || count == 0) continue;
    std::vector<cl_device_id> devices(count);
    if (cl.GetDeviceIDs(platform, kClDeviceTypeAll, count, devices.data(), nullptr) != kClSuccess) continue;
    for (cl_device_id device : devices) all.push_back({platform, device});
  }
  if (all.empty()) return NoDevice("the installed drivers have none");
  if (choice.device != UINT32_MAX) {
    if (choice.device >= all.size()) {
      return Status::Error(LLMC_ERR_NOT_FOUND, "There is no OpenCL device number " + std::to_string(choice.device) +
                                                   "; this machine has numbers 0 … " + std::to_string(all.size() - 1) +
                                                   ".");
    }
    number_ = choice.device;
  } else {
    std::vector<uint32_t> numbers, gpus;
    for (uint32_t i = 0; i < all.size(); ++i) {
      numbers.push_back(i);
      if (Number<cl_bitfield>(cl, all[i].device, kClDeviceType) & kClDeviceTypeGpu) gpus.push_back(i);
    }
    const std::vector<uint32_t>& among = gpus.empty() ? numbers : gpus;
    number_ = among[choice.local_rank % among.size()];
  }
  platform_ = all[number_].platform;
  device_ = all[number_].device;
  return Status::Ok();
}

Status ClMachine::Describe() {
  const ClFunctions& cl = **api_;
  name_ = DeviceText(cl, device_, kClDeviceName);
  driver_ = DeviceText(cl, device_, kClDriverVersion);
  version_ = DeviceText(cl, device_, kClDeviceVersion);
  platform_name_ = Text([&](size_t room, void* to, size_t* bytes) {
    return cl.GetPlatformInfo(platform_, kClPlatformName, room, to, bytes);
  });
  memory_bytes_ = Number<cl_ulong>(cl, device_, kClDeviceGlobalMemSize);
  buffer_bytes_ = Number<cl_ulong>(cl, device_, kClDeviceMaxMemAllocSize);
  local_bytes_ = Number<cl_ulong>(cl, device_, kClDeviceLocalMemSize);
  group_items_ = Number<size_t>(cl, device_, kClDeviceMaxWorkGroupSize);
  shares_host_memory_ = Number<cl_bool>(cl, device_, kClDeviceHostUnifiedMemory) != kClFalse;
  compute_units_ = Number<cl_uint>(cl, device_, kClDeviceMaxComputeUnits);
  divides_exactly_ = Number<cl_bitfield>(cl, device_, kClDeviceSingleFpConfig) & kClFpCorrectlyRoundedDivideSqrt;
  if (Number<cl_bool>(cl, device_, kClDeviceAvailable) == kClFalse) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "The OpenCL device '" + name_ +
                                                 "' is not available now; wait for whoever has it, or choose another.");
  }
  has_doubles_ = Number<cl_bitfield>(cl, device_, kClDeviceDoubleFpConfig) != 0;
  const std::string extensions = DeviceText(cl, device_, kClDeviceExtensions);
  // Its functions are those of OpenCL C 3.0, which devices of OpenCL 3.0 have.
  has_opencl3_ = version_.rfind("OpenCL 3.", 0) == 0;
  has_dot_products_ = Lists(extensions, "cl_khr_integer_dot_product") && has_opencl3_;
  if (!Lists(extensions, "cl_khr_command_buffer")) return Status::Ok();
  has_command_buffers_ = true;
  replays_overlap_ = Number<cl_bitfield>(cl, device_, kClDeviceCommandBufferCapabilities) & kClCommandBufferCanOverlap;
#define LLMC_CL_FIND(result, name, arguments)                                                                        \
  recording_.name =                                                                                                  \
      reinterpret_cast<result(*) arguments>(cl.GetExtensionFunctionAddressForPlatform(platform_, "cl" #name "KHR")); \
  if (recording_.name == nullptr) has_command_buffers_ = false;
  LLMC_CL_COMMAND_BUFFER_FUNCTIONS(LLMC_CL_FIND)
#undef LLMC_CL_FIND
  return Status::Ok();
}

Status ClMachine::MakeProbe() {
  const std::string doing = "Opening the OpenCL device '" + name_ + "'";
  cl_int code = kClSuccess;
  probe_queue_ = (*this)->CreateCommandQueue(context_, device_, 0, &code);
  LLMC_RETURN_IF_CL_ERROR(doing, code);
  probe_ = (*this)->CreateBuffer(context_, kClMemReadWrite, sizeof(num_probes_), nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR(doing, code);
  return Status::Ok();
}

// A driver that is stuck may not return from a call: such a call keeps what it uses.
bool ClMachine::Answers(std::chrono::nanoseconds most) const {
  const auto ask = [api = api_, queue = probe_queue_, probe = probe_, asked = ++num_probes_] {
    const ClFunctions& cl = **api;
    uint64_t answer = 0;
    return cl.EnqueueWriteBuffer(queue, probe, kClTrue, 0, sizeof(asked), &asked, 0, nullptr, nullptr) == kClSuccess &&
           cl.EnqueueReadBuffer(queue, probe, kClTrue, 0, sizeof(answer), &answer, 0, nullptr, nullptr) == kClSuccess &&
           answer == asked;
  };
  if (const std::optional<bool> answers = CallWithin(most, ask)) return *answers;
  probe_queue_ = nullptr;
  probe_ = nullptr;
  return false;
}

Status ClMachine::CheckAlive() const {
  const std::lock_guard<std::mutex> lock(lost_mutex_);
  return lost_;
}

Status ClMachine::Judge(const Status& failed) const {
  const std::lock_guard<std::mutex> lock(lost_mutex_);
  if (!lost_.ok()) return lost_;
  if (Answers(kMostProbeTime)) return failed;
  const std::string why = failed.message.substr(0, failed.message.rfind("; "));
  lost_ =
      Status::Error(LLMC_ERR_DEVICE_LOST, why + "; the device '" + name_ +
                                              "' is lost to this process: restart it, and look at the driver's log.");
  return lost_;
}

Status ClMachine::AskAlive(std::chrono::nanoseconds most) const {
  const std::lock_guard<std::mutex> lock(lost_mutex_);
  if (!lost_.ok()) return lost_;
  // Twice: a driver may refuse one call and take the next. A call that did not return has kept the queue.
  if (Answers(most) || (probe_queue_ != nullptr && Answers(most))) return Status::Ok();
  lost_ = Status::Error(LLMC_ERR_DEVICE_LOST,
                        "The device '" + name_ +
                            "' does not answer while nothing runs; it is lost to this process: restart it, and look at "
                            "the driver's log.");
  return lost_;
}

// PoCL keeps every kernel. Asked for a binary, it would build them all once more, for groups of any size.
bool ClMachine::keeps_programs() const { return platform_name_ == "Portable Computing Language"; }

bool ClMachine::HasLanes(cl_kernel kernel, size_t items) const {
  return KernelHasLanes(**api_, platform_, device_, kernel, items, lanes_);
}

std::string ClMachine::build_options(const ClLanes& lanes) const {
  // No fused or relaxed arithmetic unless a kernel says so; kernel sources turn contraction off.
  const std::string language = has_dot_products_ || lanes.count > 1 ? "-cl-std=CL3.0" : "-cl-std=CL1.2";
  return language + lanes.build_options() + (divides_exactly_ ? " -cl-fp32-correctly-rounded-divide-sqrt" : "");
}

std::vector<std::pair<std::string, std::string>> ClMachine::Facts() const {
  return {{"level", std::to_string(kMaxClLevel)},
          {"device", name_},
          {"number", std::to_string(number_)},
          {"platform", platform_name_},
          {"version", version_},
          {"driver", driver_},
          {"compute_units", std::to_string(compute_units_)},
          {"memory_bytes", std::to_string(memory_bytes_)},
          {"host_memory", shares_host_memory_ ? "yes" : "no"},
          {"largest_buffer_bytes", std::to_string(buffer_bytes_)},
          {"local_memory_bytes", std::to_string(local_bytes_)},
          {"command_buffers", has_command_buffers_ ? "yes" : "no"},
          {"double_precision", has_doubles_ ? "yes" : "no"},
          {"dot_products", has_dot_products_ ? "yes" : "no"},
          {"lanes", std::to_string(lanes_.count)}};
}

Status ClMachine::AwaitQueued(cl_command_queue queue, const char* doing) const {
  const ClFunctions& cl = **api_;
  cl_event queued = nullptr;
  cl_int code = cl.EnqueueMarkerWithWaitList(queue, 0, nullptr, &queued);
  if (code == kClSuccess) {
    code = cl.Flush(queue);
    const cl_int waited = cl.WaitForEvents(1, &queued);
    cl.ReleaseEvent(queued);
    if (code == kClSuccess) code = waited;
  }
  LLMC_RETURN_IF_CL_ERROR(doing + (" on '" + name_ + "'"), code);
  return Status::Ok();
}

}  // namespace llmc
