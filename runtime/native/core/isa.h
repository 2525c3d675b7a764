// ISA levels of FORMAT.md and whether this machine has them.
#pragma once
#include <cstdint>

namespace llmc {

constexpr uint32_t kMaxIsaLevel = 5;
const char* IsaName(uint32_t level);
// The highest level this CPU and operating system support, or the limit below; 0 when not even the lowest.
uint32_t MachineIsaLevel();
// From now on, this process takes the machine for one of at most `level`.
void LimitIsaLevel(uint32_t level);
// Asks the operating system for what a level needs beyond the CPU (AMX tile state). False when it refuses.
bool EnableIsaLevel(uint32_t level);

}  // namespace llmc
