// Graphs that are replayed.
#pragma once
#include <vector>

#include "streams.h"

namespace stub_cuda {

struct Exec {
  std::vector<Operation> steps;
  bool uploaded = false;
};

}  // namespace stub_cuda
