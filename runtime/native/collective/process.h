// Identifies a process of this machine even if its number is reused.
#pragma once
#include <cstdint>

namespace llmc {

// Start time of a process in ticks since boot; 0 if it has ended or is a zombie.
uint64_t StartOfProcess(int32_t pid);

}  // namespace llmc
