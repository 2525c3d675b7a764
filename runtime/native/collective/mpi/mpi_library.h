// MpiLibrary: an MPI loaded at run time, with the binary interface of MPICH (also Intel MPI and others) or of Open MPI.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"

namespace llmc {

// A started operation; MpiLibrary::Test tells when it is done. Its buffers must stay until then.
struct MpiRequest {
  uint64_t handle = 0;
};

// Channels with independent operations: messages of rank 0; what the ranks of a stage compute together; and sums that
// go on beside those.
enum class MpiChannel : uint32_t { kSteps, kSums, kOtherSums };
constexpr uint32_t kNumMpiChannels = 3;

// Messages between two ranks: what a stage passes on, and what rank 0 says to each of several stages.
enum class MpiTag : int { kPassedOn = 1, kSaid = 2 };

// Any thread; calls are serialized, and none but Divide waits for another rank. Every rank of a channel starts the same
// operations in the same order; Send and Receive are of two ranks. Sizes are in bytes.
class MpiLibrary {
 public:
  // path: for dlopen. Loads and starts MPI, once per process; mpirun must have started the process.
  static Status Start(const std::string& path, std::unique_ptr<MpiLibrary>* out);
  virtual ~MpiLibrary() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;
  // From rank 0 to all others.
  virtual Status Broadcast(MpiChannel channel, void* data, int bytes, MpiRequest* out) = 0;
  // to: the data of every rank, in rank order.
  virtual Status AllGather(MpiChannel channel, const void* from, int bytes, void* to, MpiRequest* out) = 0;
  // Makes channels of sums of their own for each `size` ranks; before, all are in them. Call once at most. There, rank r
  // is the r-th of the `size`. All ranks must call it.
  virtual Status Divide(uint32_t size) = 0;
  // To and from one other rank, in order by tag. Ranks are those of all.
  virtual Status Send(MpiTag tag, const void* data, int bytes, uint32_t to, MpiRequest* out) = 0;
  virtual Status Receive(MpiTag tag, void* data, int bytes, uint32_t from, MpiRequest* out) = 0;
  // As AllGather with different sizes: rank r contributes bytes[r], stored at to + offsets[r].
  virtual Status AllGatherParts(MpiChannel channel, const void* from, void* to, const int* bytes, const int* offsets,
                                MpiRequest* out) = 0;
  // Sends bytes[r] at from + offsets[r] to rank r, and receives `own` bytes from each rank r, stored at to + r * own.
  // own_bytes and own_offsets have one entry per rank; all sizes are `own`.
  virtual Status AllToAll(MpiChannel channel, const void* from, const int* bytes, const int* offsets, void* to,
                          const int* own_bytes, const int* own_offsets, MpiRequest* out) = 0;
  virtual Status Barrier(MpiChannel channel, MpiRequest* out) = 0;
  virtual Status Test(MpiRequest* request, bool* done) = 0;
  // Every rank calls it once all are done, and nothing afterwards. Without it mpirun reports a failure. It waits for
  // most_ns at most: behind large messages, ranks of MPICH over TCP may wait for each other for ever here.
  virtual void Finish(uint64_t most_ns) = 0;
};

}  // namespace llmc
