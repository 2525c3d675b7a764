// MpiSum: a sum of a stage's ranks that is on its way over MPI, piece by piece. MPI adds nothing: parts are added here,
// in the order of the ranks, so that the bits do not depend on the transport.
#pragma once
#include <cstdint>
#include <vector>

#include "collective/collective.h"
#include "collective/mpi/mpi_library.h"

namespace llmc {

constexpr uint64_t kMpiPiece = uint64_t{1} << 20;  // most floats per MPI operation

inline int MpiBytes(uint64_t floats) { return static_cast<int>(floats * sizeof(float)); }

class MpiSum {
 public:
  // channel: of sums, one of its own. The calling rank is the `place`-th of the stage's `ranks`.
  MpiSum(MpiLibrary* mpi, MpiChannel channel, uint32_t place, uint32_t ranks)
      : mpi_(mpi), channel_(channel), place_(place), ranks_(ranks) {}

  bool done() const { return phase_ == Phase::kDone; }
  // Call when the last sum is done. The memory of `work` must stay until this one is.
  void Begin(const Reduction& work);
  // Moves the sum on as far as the other ranks have come; waits for none. An error comes again at every call.
  Status Advance();

 private:
  // What is awaited: the parts of all ranks; those of this rank's share of the elements; or the sums of all shares.
  enum class Phase { kDone, kParts, kShares, kSums };

  Status BeginPiece();
  Status GatherParts(const float* from);
  Status ExchangeShares(const float* from);
  Status AddShares();
  // Of the piece that has arrived.
  Status Arrived();
  Status EndPiece(float* sum);

  MpiLibrary* mpi_;
  MpiChannel channel_;
  uint32_t place_, ranks_;
  Phase phase_ = Phase::kDone;
  Status error_;
  Reduction work_{};
  uint64_t first_ = 0, count_ = 0;  // of the piece
  MpiRequest request_;
  // Of a piece. They outlive what a failure has left unfinished.
  std::vector<float> given_;  // by rank
  std::vector<float> sums_;
  std::vector<int> bytes_, offsets_, own_bytes_, own_offsets_;
};

}  // namespace llmc
