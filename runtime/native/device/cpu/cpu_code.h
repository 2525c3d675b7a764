// CpuCode: the kernels of an artifact, loaded for this CPU. Immutable and shared.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"

namespace llmc {

// Launch facts of a kernel for a CPU (FORMAT.md).
struct CpuLaunch {
  uint32_t max_tasks = 0, weight_parts = 0;
};
inline CpuLaunch LaunchOf(const KernelRecord& kernel) { return {kernel.launch[0], kernel.launch[1]}; }

class CpuCode {
 public:
  CpuCode() = default;
  CpuCode(const CpuCode&) = delete;
  CpuCode& operator=(const CpuCode&) = delete;
  ~CpuCode();

  // Refuses code for other devices, and for a level that this CPU lacks.
  static Status Load(const Artifact& artifact, std::shared_ptr<const CpuCode>* out);

  void* function(uint32_t kernel) const { return functions_[kernel]; }
  // Reads a byte of each page from the first kernel to the last one, so that no call of them waits for the file.
  void Touch() const;

 private:
  struct Range {
    const char *first = nullptr, *last = nullptr;
  };
  std::vector<Range> ranges_;  // [library] of its kernels
  std::vector<void*> libraries_, functions_;
};

}  // namespace llmc
