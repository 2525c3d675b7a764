// CuLibrary: CUDA's driver, opened at run time. One llmc serves machines with and without it.
#pragma once
#include <memory>
#include <string>

#include "core/status.h"
#include "device/cuda/cu_api.h"

namespace llmc {

constexpr const char* kCuLibrary = "libcuda.so.1";

class CuLibrary {
 public:
  // path: of a driver's library, or the name that the system's linker knows it by. It stays loaded as long as the
  // process: drivers have threads of their own.
  static Status Load(const std::string& path, std::shared_ptr<const CuLibrary>* out);

  const CuFunctions& operator*() const { return functions_; }
  const CuFunctions* operator->() const { return &functions_; }
  // As the driver's numbers name an error: "out of memory (CUDA error 2)".
  std::string ErrorName(CuResult code) const;

 private:
  CuFunctions functions_;
};

using CuApi = std::shared_ptr<const CuLibrary>;

// Whether nothing of the process can use the device's context after such an error.
bool LosesDevice(CuResult code);
// A call that failed: "`doing` failed: out of memory (CUDA error 2); what to do".
Status CuError(const CuLibrary& cuda, const std::string& doing, CuResult code);

}  // namespace llmc
