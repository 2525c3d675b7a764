#include "device/gpu/swap_time.h"

#include <algorithm>

#include "core/clock.h"

namespace llmc {

Status TimeSwap(const std::function<Status()>& copy, const std::function<Status()>& finish, uint64_t* ns) {
  constexpr uint32_t kTimes = 8;
  // The first round may have to wake the device, and allocates pages of the host.
  for (int round = 0; round < 2; ++round) {
    const uint64_t begin = MonotonicNs();
    for (uint32_t i = 0; i < kTimes; ++i) LLMC_RETURN_IF_ERROR(copy());
    LLMC_RETURN_IF_ERROR(finish());
    *ns = std::max<uint64_t>((MonotonicNs() - begin) / kTimes, 1);
  }
  return Status::Ok();
}

}  // namespace llmc
