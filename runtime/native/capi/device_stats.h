// Statistics of devices across the C ABI.
#pragma once
#include <algorithm>
#include <vector>

#include "core/c_struct.h"
#include "core/error.h"
#include "device/device.h"

namespace llmc {

// Writes at most `capacity` of a device's statistics, and their number.
inline Status GiveDeviceStats(const std::vector<DeviceStat>& of, llmc_device_stat* stats, uint64_t capacity,
                              uint64_t* count) {
  if (count == nullptr) return NullArgument("count");
  if (capacity > 0) LLMC_RETURN_IF_ERROR(CheckStruct(stats, "stats[0]"));
  std::vector<llmc_device_stat> all;
  for (const DeviceStat& one : of) all.push_back({0, 0, one.name, one.value});
  WriteArray(all, std::min<uint64_t>(capacity, all.size()), stats);
  *count = all.size();
  return Status::Ok();
}

}  // namespace llmc
