// CuArguments: arguments of a kernel: buffers, offsets in these, scalars (FORMAT.md).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "device/cuda/cu_api.h"

namespace llmc {

// Each pointer is the beginning of an operand. places and scalars must outlive it.
class CuArguments {
 public:
  CuArguments(const std::vector<CuPointer>& places, const CuPointer& scalars) {
    size_t count = 0;
    for (const CuPointer& place : places) pointers_[count++] = const_cast<CuPointer*>(&place);
    for (size_t i = 0; i < places.size(); ++i) pointers_[count++] = &zero_;
    pointers_[count] = const_cast<CuPointer*>(&scalars);
  }
  void** get() { return pointers_.data(); }

 private:
  int32_t zero_ = 0;
  std::array<void*, 2 * kMaxBuffers + 1> pointers_{};
};

}  // namespace llmc
