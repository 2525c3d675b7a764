// ISA levels of FORMAT.md and whether this machine has them.
#pragma once
#include <cstdint>

namespace llmc {

constexpr uint32_t kMaxIsaLevel = 5;
const char* IsaName(uint32_t level);
// The highest level supported by this CPU and operating system, or the limit if that is lower; 0 if not even the
// lowest.
uint32_t MachineIsaLevel();
// From now on, this process treats the machine as having at most `level`.
void LimitIsaLevel(uint32_t level);
// Requests from the operating system what a level needs beyond the CPU (AMX tile state). False if refused.
bool EnableIsaLevel(uint32_t level);

}  // namespace llmc
