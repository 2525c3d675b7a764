// The CPU as a kind of device.
#pragma once
#include "device/registry.h"

namespace llmc {

extern const DeviceKind kCpuKind;

}  // namespace llmc
