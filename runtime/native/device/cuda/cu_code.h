// CuCode: a code file for devices of kind cuda (FORMAT.md). It has, for each kernel, machine code of some
// architectures, and PTX.
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
  // Runs on this capability alone. Else cubins run on later ones of the same major, PTX on all later ones. Cubins of and
  // for Tegra are exact in any case.
  bool exact;
  const unsigned char* data;
  size_t bytes;

  bool RunsOn(uint32_t device_capability) const;
  // sm_90, sm_90a, or compute_90 for PTX.
  std::string Name() const;
};

class CuCode {
 public:
  // data must outlive the result. *wrong says what is damaged, or is empty.
  static CuCode Read(const unsigned char* data, size_t bytes, uint32_t num_kernels, std::string* wrong);

  // The best image for a GPU: machine code before PTX, later before earlier; nullptr if there is none.
  const CuImage* Choose(uint32_t kernel, uint32_t device_capability) const;
  // Whether an image of this file waits until all kernels before it have ended, and lets the next one begin before that.
  bool Awaits(const CuImage& image) const { return awaits_ && image.capability >= 90; }
  // Names of all architectures for which a kernel has code.
  std::string Architectures(uint32_t kernel) const;
  // The architecture to compile for, for a GPU of this capability: its own, else the latest one before it. 0: none.
  static uint32_t NamedFor(uint32_t device_capability);

 private:
  std::vector<CuImage> images_;
  bool awaits_ = false;
};

}  // namespace llmc
