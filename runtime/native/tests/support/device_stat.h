// One counter of an engine's device.
#pragma once
#include <cstdint>
#include <string>

#include "engine/engine.h"
#include "support/check.h"

namespace llmc_test {

inline uint64_t Stat(const llmc::Engine& engine, const std::string& name) {
  for (const llmc::DeviceStat& stat : engine.DeviceStats()) {
    if (stat.name == name) return stat.value;
  }
  CHECK(!"there is such a count");
  return 0;
}

}  // namespace llmc_test
