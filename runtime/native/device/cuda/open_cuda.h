// The kind of CUDA devices.
#pragma once
#include "device/registry.h"

namespace llmc {

extern const DeviceKind kCudaKind;

}  // namespace llmc
