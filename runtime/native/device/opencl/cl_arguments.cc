#include "device/opencl/cl_arguments.h"

#include <cstddef>

namespace llmc {

Status SetArguments(const ClMachine& machine, cl_kernel kernel, const std::vector<ClPlace>& places, cl_mem scalars) {
  cl_uint index = 0;
  cl_int code = kClSuccess;
  const auto set = [&](size_t bytes, const void* value) {
    const cl_int set_code = machine->SetKernelArg(kernel, index++, bytes, value);
    if (code == kClSuccess) code = set_code;
  };
  for (const ClPlace& place : places) set(sizeof(cl_mem), static_cast<const void*>(&place.memory));
  for (const ClPlace& place : places) set(sizeof(place.at), &place.at);
  set(sizeof(cl_mem), static_cast<const void*>(&scalars));
  LLMC_RETURN_IF_CL_ERROR("Giving a kernel its arguments on '" + machine.name() + "'", code);
  return Status::Ok();
}

}  // namespace llmc
