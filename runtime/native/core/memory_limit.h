// Memory that this process can still allocate.
#pragma once
#include <cstdint>
#include <string>

namespace llmc {

// Bytes that can be allocated without swapping: of the machine, or less under a control group's limit. The page cache
// counts as free in both. 0 if /proc does not tell. Files are read below `root`. Throws std::bad_alloc.
uint64_t AvailableMemory(const std::string& root = "");

}  // namespace llmc
