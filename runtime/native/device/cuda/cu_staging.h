// Copies a part of a file to the device through pinned memory of the host, at the speed of the bus.
#pragma once
#include <cstdint>

#include "core/mapped_file.h"
#include "core/status.h"
#include "device/cuda/cu_handles.h"

namespace llmc {

// Copies [begin, begin + bytes) of `file` to `to` and waits for it. A few threads read parts while others are being
// sent. Returns LLMC_ERR_IO if the file cannot be read.
Status CopyFileToDevice(const CuMachinePtr& machine, const MappedFile& file, uint64_t begin, uint64_t bytes,
                        CuPointer to);

}  // namespace llmc
