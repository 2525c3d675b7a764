// Copies a part of a file to the device, through pinned memory of the host: as fast as the bus takes it.
#pragma once
#include <cstdint>

#include "core/mapped_file.h"
#include "core/status.h"
#include "device/cuda/cu_handles.h"

namespace llmc {

// Reads [begin, begin + bytes) of `file` to `to`; all of it is there when this returns. A few threads read while what
// others have read is on its way. What the disk does not deliver is LLMC_ERR_IO.
Status CopyFileToDevice(const CuMachinePtr& machine, const MappedFile& file, uint64_t begin, uint64_t bytes,
                        CuPointer to);

}  // namespace llmc
