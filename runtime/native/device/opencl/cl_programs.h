// ClPrograms: the kernels of an artifact, built for one device.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/gpu/launch.h"
#include "device/opencl/cl_binary_cache.h"
#include "device/opencl/cl_machine.h"

namespace llmc {

class ClPrograms {
 public:
  // Builds all that there is; `known`, unless it is null, has some of it already. LLMC_ERR_UNSUPPORTED_TARGET for an artifact of other devices.
  static Status Build(std::shared_ptr<const ClMachine> machine, const Artifact& artifact,
                      const std::string& cache_folder, const ClPrograms* known, std::unique_ptr<ClPrograms>* out);
  ~ClPrograms();
  ClPrograms(const ClPrograms&) = delete;
  ClPrograms& operator=(const ClPrograms&) = delete;

  cl_kernel kernel(uint32_t index) const { return kernels_[index]; }
  // One more object of a kernel, with arguments of its own; the caller releases it.
  Status Another(uint32_t index, cl_kernel* out) const;
  const GpuLaunch& launch(uint32_t index) const { return launches_[index]; }
  uint32_t num_programs() const { return static_cast<uint32_t>(programs_.size()); }
  // Of them, those whose binary was in the cache.
  uint32_t num_cached() const { return num_cached_; }
  // Once every kernel has run: drivers finish code when it is first used.
  void Store() const;

 private:
  struct Program {
    cl_program program = nullptr;
    std::string key;
    bool cached = false;
  };
  ClPrograms(std::shared_ptr<const ClMachine> machine, const std::string& cache_folder)
      : machine_(std::move(machine)), cache_(cache_folder) {}
  Status BuildProgram(const std::string& name, const char* source, size_t bytes, const ClPrograms* known, Program* out);
  Status FromBinary(const std::vector<unsigned char>& binary, Program* out) const;
  std::string Log(cl_program program) const;

  std::shared_ptr<const ClMachine> machine_;
  ClBinaryCache cache_;
  std::vector<Program> programs_;  // one or more a code file
  std::vector<cl_kernel> kernels_;
  std::vector<std::pair<cl_program, std::string>> symbols_;  // of a kernel
  std::vector<GpuLaunch> launches_;
  uint32_t num_cached_ = 0;
};

}  // namespace llmc
