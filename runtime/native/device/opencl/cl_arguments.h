// Arguments of a kernel: buffers, offsets in these, scalars (FORMAT.md).
#pragma once
#include <vector>

#include "core/status.h"
#include "device/opencl/cl_memory.h"

namespace llmc {

// Gives a kernel its arguments. places: its operands; scalars: the buffer that begins with a step's scalars.
Status SetArguments(const ClMachine& machine, cl_kernel kernel, const std::vector<ClPlace>& places, cl_mem scalars);

}  // namespace llmc
