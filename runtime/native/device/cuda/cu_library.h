// CuLibrary: CUDA's driver, opened at run time: one build serves machines with and without it.
#pragma once
#include <memory>
#include <string>

#include "core/status.h"
#include "device/cuda/cu_api.h"

namespace llmc {

constexpr const char* kCuLibrary = "libcuda.so.1";

class CuLibrary {
 public:
  // path: a driver's library, or a name that the system's linker finds. It stays loaded until the process ends, since
  // drivers have threads of their own.
  static Status Load(const std::string& path, std::shared_ptr<const CuLibrary>* out);

  const CuFunctions& operator*() const { return functions_; }
  const CuFunctions* operator->() const { return &functions_; }
  // Text of an error, with its number: "out of memory (CUDA error 2)".
  std::string ErrorName(CuResult code) const;

 private:
  CuFunctions functions_;
};

using CuApi = std::shared_ptr<const CuLibrary>;

// Whether the process can no longer use the device's context after such an error.
bool LosesDevice(CuResult code);
// Error of a failed call: "`doing` failed: out of memory (CUDA error 2); what to do".
Status CuError(const CuLibrary& cuda, const std::string& doing, CuResult code);

}  // namespace llmc
