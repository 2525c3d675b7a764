// CuCode: a code file of devices of kind cuda (FORMAT.md): for each kernel machine code of some architectures, and PTX.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace llmc {

// One kernel's code for one architecture. capability: 10 × major + minor of a compute capability.
struct CuImage {
  enum Kind : uint32_t { kCubin = 0, kPtx = 1 };

  uint32_t kernel;  // of this file, in the order of the table of kernels
  Kind kind;
  uint32_t capability;
  bool
      exact;  // for this capability alone; else cubins are for later ones of the same major, and PTX for all later ones
  const unsigned char* data;
  size_t bytes;

  bool RunsOn(uint32_t device_capability) const;
  // sm_90, sm_90a, or compute_90 for PTX.
  std::string Name() const;
};

class CuCode {
 public:
  // data must outlive it. *wrong says what is damaged; empty where nothing is.
  static CuCode Read(const unsigned char* data, size_t bytes, uint32_t num_kernels, std::string* wrong);

  // The best image for a GPU: machine code before PTX, the latest before others. nullptr: there is none.
  const CuImage* Choose(uint32_t kernel, uint32_t device_capability) const;
  // Names of all architectures that there is code for.
  std::string Architectures() const;

 private:
  std::vector<CuImage> images_;
};

}  // namespace llmc
