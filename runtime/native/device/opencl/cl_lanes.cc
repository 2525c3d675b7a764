#include "device/opencl/cl_lanes.h"

#include <algorithm>
#include <vector>

#include "device/opencl/cl_text.h"

namespace llmc {
namespace {

constexpr uint32_t kMostLanes = 32;    // of which kernels make use
constexpr uint32_t kUsualLanes = 16;   // more cost GPUs of Intel registers
constexpr size_t kItems = 256;         // of the group that is looked at
constexpr size_t kNumbers = 3;         // that each of its items finds

// Where an item is if items are counted subgroup by subgroup, how many its subgroup has, and what its neighbour passes.
constexpr char kProbe[] = R"(
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#ifdef LLMC_LANES_REQUIRED
__attribute__((intel_reqd_sub_group_size(LLMC_LANES)))
#endif
__attribute__((reqd_work_group_size(256, 1, 1))) __kernel void llmc_probe_lanes(__global uint* found) {
  const uint item = (uint)get_local_id(0);
  found[3 * item] = get_sub_group_id() * get_max_sub_group_size() + get_sub_group_local_id();
  found[3 * item + 1] = get_sub_group_size();
  found[3 * item + 2] = sub_group_shuffle_xor(item, 1u);
}
)";

// What the probe finds, or nothing if any call fails: a device without subgroups is as good.
std::vector<uint32_t> Probe(const ClFunctions& cl, cl_device_id device, cl_context context, cl_command_queue queue,
                            const std::string& options) {
  std::vector<uint32_t> found(kItems * kNumbers);
  const size_t bytes = found.size() * sizeof(uint32_t), items = kItems;
  const char* text = kProbe;
  cl_int code = kClSuccess;
  cl_program program = cl.CreateProgramWithSource(context, 1, &text, nullptr, &code);
  if (code != kClSuccess) return {};
  cl_kernel kernel = nullptr;
  cl_mem numbers = nullptr;
  const auto run = [&] {
    if (cl.BuildProgram(program, 1, &device, ("-cl-std=CL3.0" + options).c_str(), nullptr, nullptr) != kClSuccess) {
      return false;
    }
    kernel = cl.CreateKernel(program, "llmc_probe_lanes", &code);
    if (code != kClSuccess) return false;
    numbers = cl.CreateBuffer(context, kClMemReadWrite, bytes, nullptr, &code);
    return code == kClSuccess &&
           cl.SetKernelArg(kernel, 0, sizeof(cl_mem), static_cast<const void*>(&numbers)) == kClSuccess &&
           cl.EnqueueNDRangeKernel(queue, kernel, 1, nullptr, &items, &items, 0, nullptr, nullptr) == kClSuccess &&
           cl.EnqueueReadBuffer(queue, numbers, kClTrue, 0, bytes, found.data(), 0, nullptr, nullptr) == kClSuccess;
  };
  const bool ran = run();
  if (numbers != nullptr) cl.ReleaseMemObject(numbers);
  if (kernel != nullptr) cl.ReleaseKernel(kernel);
  cl.ReleaseProgram(program);
  return ran ? found : std::vector<uint32_t>();
}

// Subgroup sizes that a kernel can demand; none without Intel's extension.
std::vector<size_t> SizesOf(const ClFunctions& cl, cl_device_id device) {
  size_t bytes = 0;
  if (cl.GetDeviceInfo(device, kClDeviceSubGroupSizesIntel, 0, nullptr, &bytes) != kClSuccess) return {};
  std::vector<size_t> sizes(bytes / sizeof(size_t));
  if (cl.GetDeviceInfo(device, kClDeviceSubGroupSizesIntel, bytes, sizes.data(), nullptr) != kClSuccess) return {};
  return sizes;
}

ClLanes Demanded(const std::vector<size_t>& sizes) {
  ClLanes lanes;
  for (const size_t size : sizes) {
    if (size <= kUsualLanes && (size & (size - 1)) == 0) lanes.count = std::max(lanes.count, uint32_t(size));
  }
  lanes.required = lanes.count > 1;
  return lanes;
}

}  // namespace

std::string ClLanes::build_options() const {
  if (count == 1) return "";
  return " -DLLMC_LANES=" + std::to_string(count) + (required ? " -DLLMC_LANES_REQUIRED" : "");
}

ClLanes FindLanes(const ClFunctions& cl, cl_device_id device, cl_context context, cl_command_queue queue,
                  const std::string& extensions) {
  // Drivers of OpenCL 3.0 with subgroups need not list cl_khr_subgroups.
  if (!Lists(extensions, "cl_khr_subgroup_shuffle")) return {};
  ClLanes lanes;
  if (Lists(extensions, "cl_intel_required_subgroup_size")) lanes = Demanded(SizesOf(cl, device));
  const std::vector<uint32_t> found = Probe(cl, device, context, queue, lanes.build_options());
  if (found.empty()) return {};
  const uint32_t size = found[1];
  if (size < 2 || (size & (size - 1)) != 0 || (lanes.required && size != lanes.count)) return {};
  for (uint32_t item = 0; item < kItems; ++item) {
    const uint32_t* numbers = &found[kNumbers * item];
    if (numbers[0] != item || numbers[1] != size || numbers[2] != (item ^ 1)) return {};
  }
  if (!lanes.required) lanes.count = std::min(size, kMostLanes);
  return lanes;
}

bool KernelHasLanes(const ClFunctions& cl, cl_platform_id platform, cl_device_id device, cl_kernel kernel, size_t items,
                    const ClLanes& lanes) {
  if (lanes.count == 1 || lanes.required) return true;
  using Ask = cl_int (*)(cl_kernel, cl_device_id, cl_uint, size_t, const void*, size_t, void*, size_t*);
  const auto ask =
      reinterpret_cast<Ask>(cl.GetExtensionFunctionAddressForPlatform(platform, "clGetKernelSubGroupInfoKHR"));
  size_t size = 0;
  return ask != nullptr &&
         ask(kernel, device, kClKernelMaxSubGroupSizeForNdrange, sizeof(items), &items, sizeof(size), &size, nullptr) ==
             kClSuccess &&
         size >= lanes.count && size % lanes.count == 0;
}

}  // namespace llmc
