// CuPrograms: the kernels of an artifact, loaded for one GPU.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/cuda/cu_code.h"
#include "device/cuda/cu_handles.h"
#include "device/gpu/launch.h"

namespace llmc {

struct CuUnload {
  void operator()(const CuMachine& cuda, CuModule module) const { cuda->ModuleUnload(module); }
};

class CuPrograms {
 public:
  // Loads all kernels. Call in a scope of the machine. known: programs of an artifact that this one extends, whose
  // kernels are shared, or nullptr. Returns LLMC_ERR_UNSUPPORTED_TARGET for an artifact of other devices.
  static Status Load(CuMachinePtr machine, const Artifact& artifact, const CuPrograms* known,
                     std::shared_ptr<const CuPrograms>* out);

  CuFunction kernel(uint32_t index) const { return kernels_[index]; }
  const GpuLaunch& launch(uint32_t index) const { return launches_[index]; }
  uint32_t num_kernels() const { return static_cast<uint32_t>(kernels_.size()); }
  // Number of kernels that the driver built from PTX, for want of machine code for this GPU.
  uint32_t num_built() const { return num_built_; }
  // Whether every kernel waits for those before it, as CuCode::Awaits says.
  bool all_await() const { return all_await_; }

 private:
  explicit CuPrograms(CuMachinePtr machine) : machine_(std::move(machine)) {}
  Status LoadKernel(const Artifact& artifact, const KernelRecord& kernel, const CuImage& image);

  CuMachinePtr machine_;
  std::vector<std::shared_ptr<const CuOwned<CuModule, CuUnload>>> modules_;  // [kernel]
  std::vector<CuFunction> kernels_;
  std::vector<GpuLaunch> launches_;
  uint32_t num_built_ = 0;
  bool all_await_ = true;
};

}  // namespace llmc
