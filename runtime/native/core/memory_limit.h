// How much memory this process can still take.
#pragma once
#include <cstdint>
#include <string>

namespace llmc {

// Bytes that can be taken without swapping: the machine's, or less where a control group says so; the page cache of
// either gives way. 0 when /proc does not tell. Files are read below `root`. Throws std::bad_alloc.
uint64_t AvailableMemory(const std::string& root = "");

}  // namespace llmc
