// MpiLibrary: an MPI that is loaded at run time, of MPICH's binary interface (MPICH, Intel MPI and others) or Open MPI's.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"

namespace llmc {

// An operation that was begun; MpiLibrary::Test tells when it is done. What it reads and writes must stay until then.
struct MpiRequest {
  uint64_t handle = 0;
};

// Two channels whose operations do not wait for each other: what rank 0 says, and what all compute together.
enum class MpiChannel : uint32_t { kSteps, kSums };
constexpr uint32_t kNumMpiChannels = 2;

// Any thread; calls take turns, and none waits for another rank. Every rank begins the same operations of a channel in the
// same order. Sizes are bytes.
class MpiLibrary {
 public:
  // path: as dlopen takes it. Loads and starts MPI, once in a process, which mpirun has started.
  static Status Start(const std::string& path, std::unique_ptr<MpiLibrary>* out);
  virtual ~MpiLibrary() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;
  // From rank 0 to all others.
  virtual Status Broadcast(MpiChannel channel, void* data, int bytes, MpiRequest* out) = 0;
  // to: what every rank has, in the order of ranks.
  virtual Status AllGather(MpiChannel channel, const void* from, int bytes, void* to, MpiRequest* out) = 0;
  // As AllGather: of rank r bytes[r], which lie at to + offsets[r].
  virtual Status AllGatherParts(MpiChannel channel, const void* from, void* to, const int* bytes, const int* offsets,
                                MpiRequest* out) = 0;
  // Of `from` rank r gets bytes[r] at offsets[r], and from it come `own` bytes, which lie at r * own in `to`.
  // own_bytes and own_offsets have one number for each rank, all sizes `own`.
  virtual Status AllToAll(MpiChannel channel, const void* from, const int* bytes, const int* offsets, void* to,
                          const int* own_bytes, const int* own_offsets, MpiRequest* out) = 0;
  virtual Status Barrier(MpiChannel channel, MpiRequest* out) = 0;
  virtual Status Test(MpiRequest* request, bool* done) = 0;
  // Every rank calls it, when none has anything left to do. Without it mpirun takes the end for a failure.
  virtual void Finish() = 0;
};

}  // namespace llmc
