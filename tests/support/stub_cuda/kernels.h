// Kernels as their code says it, and launches of these.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "world.h"

namespace stub_cuda {

// A kernel as its code says it: sizes of its arguments, the most items of a group.
struct Kernel {
  std::string name;
  std::vector<int> sizes;
  unsigned most_items = 1024;
  bool awaits = true;  // waits for earlier kernels, as far as the stub can tell
};
struct Launch {
  const Kernel* kernel;
  unsigned groups, items;
  std::vector<uint64_t> values;
  bool early = false;  // begins before the one before it has ended
};
struct Module {
  std::vector<std::unique_ptr<Kernel>> kernels;
};

// Checks a launch, and takes its arguments.
int Take(const char* name, Kernel* kernel, const unsigned* grid, const unsigned* block, unsigned shared,
         void** arguments, Launch* out);
// What a launch uses.
std::vector<const void*> Uses(const Launch& launch);
void Run(const Launch& launch, const char* how);

}  // namespace stub_cuda
