// Time of copying a KV block or states to the host's memory and back, which decides whether swapping pays.
#pragma once
#include <cstdint>
#include <functional>

#include "core/status.h"

namespace llmc {

// copy: enqueues one copy there and one back. finish: waits for all. *ns: time of both, at least 1.
Status TimeSwap(const std::function<Status()>& copy, const std::function<Status()>& finish, uint64_t* ns);

}  // namespace llmc
