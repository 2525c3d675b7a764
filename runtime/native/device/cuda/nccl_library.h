// NcclLibrary: NVIDIA's collectives, opened at run time. Declares the part of their API that llmc uses, as their manual
// does: neither headers nor the library are needed to build llmc.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"
#include "device/cuda/cu_api.h"

namespace llmc {

constexpr const char* kNcclLibrary = "libnccl.so.2";

using NcclResult = int32_t;
using NcclComm = struct NcclCommId*;

struct NcclId {
  char bytes[128];
};

struct NcclConfig {  // ncclConfig_t of version 2.14, which later ones read as such
  size_t size = sizeof(NcclConfig);
  uint32_t magic = 0xcafebeef, version = 21400;
  int32_t blocking = 0;  // calls return at once: a rank that waits for another one can stop waiting
};

constexpr NcclResult kNcclSuccess = 0;
constexpr NcclResult kNcclInProgress = 7;
constexpr int32_t kNcclFloat32 = 7;

// Every function that the library must have: its name here, its symbol, its arguments. All are in NCCL 2.14.
#define LLMC_NCCL_FUNCTIONS(X)                                                                  \
  X(GetVersion, "ncclGetVersion", (int32_t*))                                                   \
  X(GetUniqueId, "ncclGetUniqueId", (NcclId*))                                                  \
  X(CommInitRank, "ncclCommInitRankConfig", (NcclComm*, int32_t, NcclId, int32_t, NcclConfig*)) \
  X(CommGetAsyncError, "ncclCommGetAsyncError", (NcclComm, NcclResult*))                        \
  X(CommAbort, "ncclCommAbort", (NcclComm))                                                     \
  X(AllGather, "ncclAllGather", (const void*, void*, size_t, int32_t, NcclComm, CuStreamHandle))

class NcclLibrary {
 public:
  // path: a library, or a name that the system's linker finds. It stays loaded until the process ends.
  static Status Load(const std::string& path, std::shared_ptr<const NcclLibrary>* out);

#define LLMC_NCCL_MEMBER(name, symbol, arguments) NcclResult(*name) arguments = nullptr;
  LLMC_NCCL_FUNCTIONS(LLMC_NCCL_MEMBER)
#undef LLMC_NCCL_MEMBER
};

// "2.20.5"
std::string NcclVersionText(int32_t version);
// Error of a failed call: "`doing` failed: …; what to do".
Status NcclError(const std::string& doing, NcclResult code);

}  // namespace llmc
