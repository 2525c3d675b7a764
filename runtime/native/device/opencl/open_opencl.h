// The kind of OpenCL devices.
#pragma once
#include "device/registry.h"

namespace llmc {

extern const DeviceKind kOpenClKind;

}  // namespace llmc
