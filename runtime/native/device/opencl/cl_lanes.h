// Subgroups of OpenCL 3.0: items of a group that run in step, called lanes, and pass each other numbers without a
// barrier.
#pragma once
#include <cstdint>
#include <string>

#include "device/opencl/cl_api.h"

namespace llmc {

struct ClLanes {
  // Neighbouring items that run in step, a power of two: 1 if the device has no subgroups that kernels can use.
  uint32_t count = 1;
  // Whether a kernel can demand as many. Else the driver chooses for each kernel, and KernelHasLanes tells.
  bool required = false;

  // Build options that tell kernels of it; empty where there are none.
  std::string build_options() const;
};

// Runs a kernel that looks at the device's subgroups. extensions: of the device.
ClLanes FindLanes(const ClFunctions& cl, cl_device_id device, cl_context context, cl_command_queue queue,
                  const std::string& extensions);

// Whether the subgroups of a kernel are whole runs of lanes, in groups of `items`.
bool KernelHasLanes(const ClFunctions& cl, cl_platform_id platform, cl_device_id device, cl_kernel kernel, size_t items,
                    const ClLanes& lanes);

}  // namespace llmc
