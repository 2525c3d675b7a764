// A process of this machine, told apart from a later one of the same number.
#pragma once
#include <cstdint>

namespace llmc {

// When a process began, in ticks since the machine did; 0: it is there no more, or a zombie.
uint64_t StartOfProcess(int32_t pid);

}  // namespace llmc
