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
  // Builds all programs. known: those of an artifact that this one extends, which are shared, or nullptr. Returns
  // LLMC_ERR_UNSUPPORTED_TARGET for an artifact of other devices.
  static Status Build(const std::shared_ptr<const ClMachine>& machine, const Artifact& artifact,
                      const std::string& cache_folder, const ClPrograms* known, std::unique_ptr<ClPrograms>* out);
  ~ClPrograms();
  ClPrograms(const ClPrograms&) = delete;
  ClPrograms& operator=(const ClPrograms&) = delete;

  cl_kernel kernel(uint32_t index) const { return kernels_[index]; }
  // Creates another object of a kernel, with arguments of its own. The caller releases it.
  Status Another(uint32_t index, cl_kernel* out) const;
  const GpuLaunch& launch(uint32_t index) const { return launches_[index]; }
  uint32_t num_programs() const { return static_cast<uint32_t>(programs_.size()); }
  // Number of programs whose binary was in the cache.
  uint32_t num_cached() const { return num_cached_; }
  // Writes binaries to the cache. Call once every kernel has run: drivers finish code at its first use.
  void Store() const;

 private:
  struct Program {
    cl_program program = nullptr;
    std::string key;
    bool cached = false;
    bool stored = false;  // whoever built it writes it to the cache, or it came from there
  };
  struct Source;  // the text of one program
  ClPrograms(std::shared_ptr<const ClMachine> machine, const std::string& cache_folder, std::string options)
      : machine_(std::move(machine)), cache_(cache_folder), options_(std::move(options)) {}
  static Status BuildFor(const ClLanes& lanes, std::shared_ptr<const ClMachine> machine, const Artifact& artifact,
                         const std::string& cache_folder, const ClPrograms* known, std::unique_ptr<ClPrograms>* out);
  static std::vector<Source> SourcesOf(const std::string& file, const MappedFile& code);
  // On several threads: drivers take long for each.
  Status BuildAll(const std::vector<Source>& sources, const ClPrograms* known);
  Status BuildProgram(const Source& of, const ClPrograms* known, Program* out) const;
  Status FromBinary(const std::vector<unsigned char>& binary, Program* out) const;
  std::string Log(cl_program program) const;

  std::shared_ptr<const ClMachine> machine_;
  ClBinaryCache cache_;
  std::string options_;  // with which all programs are built
  std::vector<Program> programs_;  // one or more per code file
  std::vector<cl_kernel> kernels_;
  std::vector<std::pair<cl_program, std::string>> symbols_;  // [kernel]
  std::vector<GpuLaunch> launches_;
  uint32_t num_cached_ = 0;
};

}  // namespace llmc
