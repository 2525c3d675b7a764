// How subgroups of an OpenCL device are looked at, and that a device whose subgroups are of no use goes without.
#include "device/opencl/cl_lanes.h"

#include <cstring>
#include <string>
#include <vector>

#include "support/check.h"

using namespace llmc;

namespace {

constexpr uint32_t kItems = 256;
const std::string kExtensions = "cl_khr_fp64 cl_khr_subgroup_shuffle",
                  kIntel = kExtensions + " cl_intel_required_subgroup_size";

// The device, and what it was asked.
struct Device {
  uint32_t size = 32;         // of a subgroup, where a kernel demands none
  uint32_t kernel_size = 32;  // of a kernel that is asked about
  std::vector<size_t> sizes;  // that a kernel may demand
  bool in_order = true, uniform = true, shuffles = true, tells = true;
  const char* fails = "";
  std::string options;
  int objects = 0;
} g_device;

bool Fails(const char* name) { return std::strcmp(g_device.fails, name) == 0; }

template <class T>
T Made(const char* name, cl_int* code) {
  *code = Fails(name) ? kClOutOfResources : kClSuccess;
  g_device.objects += *code == kClSuccess;
  return Fails(name) ? nullptr : reinterpret_cast<T>(&g_device);
}

cl_int Released() {
  --g_device.objects;
  return kClSuccess;
}

uint32_t Demanded() {
  const size_t at = g_device.options.find("LLMC_LANES=");
  return g_device.options.find("REQUIRED") == std::string::npos ? 0 : std::stoul(g_device.options.substr(at + 11));
}

cl_int Find(uint32_t* found) {
  const uint32_t size = Demanded() != 0 ? Demanded() : g_device.size;
  for (uint32_t item = 0; item < kItems; ++item) {
    found[3 * item] = g_device.in_order ? item : kItems - 1 - item;
    found[3 * item + 1] = g_device.uniform || item + size < kItems ? size : size / 2;
    found[3 * item + 2] = g_device.shuffles ? item ^ 1 : item;
  }
  return kClSuccess;
}

cl_int Tell(cl_kernel, cl_device_id, cl_uint, size_t, const void*, size_t, void* value, size_t*) {
  const size_t size = g_device.kernel_size;
  std::memcpy(value, &size, sizeof(size));
  return kClSuccess;
}

ClFunctions Functions() {
  ClFunctions cl;
  cl.GetDeviceInfo = [](cl_device_id, cl_uint, size_t room, void* value, size_t* size) -> cl_int {
    const size_t bytes = g_device.sizes.size() * sizeof(size_t);
    if (size != nullptr) *size = bytes;
    if (value != nullptr) std::memcpy(value, g_device.sizes.data(), room < bytes ? room : bytes);
    return kClSuccess;
  };
  cl.CreateProgramWithSource = [](cl_context, cl_uint, const char**, const size_t*, cl_int* code) {
    return Made<cl_program>("CreateProgram", code);
  };
  cl.BuildProgram = [](cl_program, cl_uint, const cl_device_id*, const char* options, void (*)(cl_program, void*),
                       void*) -> cl_int {
    g_device.options = options;
    return Fails("BuildProgram") ? kClBuildProgramFailure : kClSuccess;
  };
  cl.CreateKernel = [](cl_program, const char*, cl_int* code) { return Made<cl_kernel>("CreateKernel", code); };
  cl.CreateBuffer = [](cl_context, cl_bitfield, size_t, void*, cl_int* code) {
    return Made<cl_mem>("CreateBuffer", code);
  };
  cl.SetKernelArg = [](cl_kernel, cl_uint, size_t, const void*) -> cl_int { return kClSuccess; };
  cl.EnqueueNDRangeKernel = [](cl_command_queue, cl_kernel, cl_uint, const size_t*, const size_t*, const size_t*,
                               cl_uint, const cl_event*, cl_event*) -> cl_int {
    return Fails("EnqueueNDRangeKernel") ? kClOutOfResources : kClSuccess;
  };
  cl.EnqueueReadBuffer = [](cl_command_queue, cl_mem, cl_bool, size_t, size_t, void* to, cl_uint, const cl_event*,
                            cl_event*) -> cl_int {
    return Fails("EnqueueReadBuffer") ? kClOutOfResources : Find(static_cast<uint32_t*>(to));
  };
  cl.ReleaseMemObject = [](cl_mem) { return Released(); };
  cl.ReleaseKernel = [](cl_kernel) { return Released(); };
  cl.ReleaseProgram = [](cl_program) { return Released(); };
  cl.GetExtensionFunctionAddressForPlatform = [](cl_platform_id, const char*) -> void* {
    return g_device.tells ? reinterpret_cast<void*>(&Tell) : nullptr;
  };
  return cl;
}

ClLanes Lanes(const Device& device, const std::string& extensions = kExtensions) {
  g_device = device;
  const ClLanes lanes = FindLanes(Functions(), nullptr, nullptr, nullptr, extensions);
  CHECK_EQ(g_device.objects, 0);
  return lanes;
}

Device With(bool Device::* part) {
  Device device;
  device.*part = false;
  return device;
}

void TestDriversThatChoose() {
  const ClLanes lanes = Lanes(Device());
  CHECK_EQ(lanes.count, 32u);
  CHECK(!lanes.required);
  CHECK_EQ(lanes.build_options(), std::string(" -DLLMC_LANES=32"));
  Device device;
  for (const auto& [size, count] : {std::pair{64u, 32u}, {8u, 8u}, {2u, 2u}, {1u, 1u}, {24u, 1u}}) {
    device.size = size;
    CHECK_EQ(Lanes(device).count, count);
  }
}

void TestKernelsThatDemand() {
  Device device;
  for (const auto& [sizes, count] : {std::pair{std::vector<size_t>{8, 16, 32}, 16u}, {{16, 32}, 16u}, {{8}, 8u}}) {
    device.sizes = sizes;
    const ClLanes lanes = Lanes(device, kIntel);
    CHECK_EQ(lanes.count, count);
    CHECK(lanes.required);
    CHECK_EQ(lanes.build_options(), " -DLLMC_LANES=" + std::to_string(count) + " -DLLMC_LANES_REQUIRED");
  }
  device.sizes = {32, 64};  // the driver's choice is looked at
  CHECK_EQ(Lanes(device, kIntel).count, 32u);
  CHECK(!Lanes(device, kIntel).required);
}

void TestSubgroupsOfNoUse() {
  CHECK_EQ(Lanes(Device(), "cl_khr_fp64").count, 1u);
  CHECK_EQ(Lanes(Device(), "cl_khr_fp64").build_options(), std::string());
  for (const auto part : {&Device::in_order, &Device::uniform, &Device::shuffles})
    CHECK_EQ(Lanes(With(part)).count, 1u);
  for (const char* name :
       {"CreateProgram", "BuildProgram", "CreateKernel", "CreateBuffer", "EnqueueNDRangeKernel", "EnqueueReadBuffer"}) {
    Device device;
    device.fails = name;
    CHECK_EQ(Lanes(device).count, 1u);
  }
}

void TestKernels() {
  const auto has = [](const ClLanes& lanes) {
    return KernelHasLanes(Functions(), nullptr, nullptr, nullptr, 64, lanes);
  };
  g_device = Device();
  for (const auto& [size, expected] : {std::pair{32u, true}, {64u, true}, {16u, false}, {8u, false}}) {
    g_device.kernel_size = size;
    CHECK_EQ(has({32, false}), expected);
  }
  CHECK(has({16, true}));
  CHECK(has({1, false}));
  g_device = With(&Device::tells);
  CHECK(!has({32, false}));
}

}  // namespace

int main() {
  TestDriversThatChoose();
  TestKernelsThatDemand();
  TestSubgroupsOfNoUse();
  TestKernels();
  return llmc_test::Finish("cl_lanes_test");
}
