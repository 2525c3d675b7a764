// ClLibrary: an OpenCL library, opened at run time: one build serves machines with and without OpenCL.
#pragma once
#include <memory>
#include <string>

#include "core/status.h"
#include "device/opencl/cl_api.h"

namespace llmc {

constexpr const char* kClLibrary = "libOpenCL.so.1";

class ClLibrary {
 public:
  // path: a loader of OpenCL drivers, or a name that the system's linker finds. It stays loaded until the process ends,
  // since drivers have threads of their own.
  static Status Load(const std::string& path, std::shared_ptr<const ClLibrary>* out);

  const ClFunctions& operator*() const { return functions_; }
  const ClFunctions* operator->() const { return &functions_; }

 private:
  ClFunctions functions_;
};

using ClApi = std::shared_ptr<const ClLibrary>;

// OpenCL's name of an error.
std::string ClErrorName(cl_int code);
// Error of a failed call: "`doing` failed: out of resources (-5); what to do".
Status ClError(const std::string& doing, cl_int code);

#define LLMC_RETURN_IF_CL_ERROR(doing, expr)                                     \
  do {                                                                           \
    const ::llmc::cl_int cl_code_ = (expr);                                      \
    if (cl_code_ != ::llmc::kClSuccess) return ::llmc::ClError(doing, cl_code_); \
  } while (0)

}  // namespace llmc
