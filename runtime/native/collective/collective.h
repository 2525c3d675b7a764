// Collective: operations that the ranks of an artifact compute together. Every rank calls the same operations in the
// same order, each with all threads of its team. Teams may differ in size.
#pragma once
#include <cstdint>

#include "core/status.h"

namespace llmc {

// A sum over ranks: out = ((rank 0 + rank 1 + …) + bias) + residual, float32, [rows, width]. The bits are the same on
// every rank and do not depend on the number of rows or threads.
struct Reduction {
  const float* in;  // of this rank; may be out
  float* out;
  const float* bias;  // [width]; nullptr: none
  const float* residual;  // [rows, width], may be out; nullptr: none
  uint64_t rows, width;
};

// Concatenates the columns of all ranks: those of rank r begin at r · width / num_ranks.
struct Gathering {
  const float* in;  // [rows, width / num_ranks]
  float* out;  // [rows, width]
  uint64_t rows, width;
};

class Collective {
 public:
  virtual ~Collective() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;
  // Called by each of num_threads threads. They synchronize before the call, and again before the next call or before
  // reading `out`. Once a rank has failed they return at once, and `out` is undefined.
  virtual void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) = 0;
  virtual void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) = 0;
  // An error once a rank has failed, which names the rank and the reason.
  virtual Status status() const = 0;
};

}  // namespace llmc
