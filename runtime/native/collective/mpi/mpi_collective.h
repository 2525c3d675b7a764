// MpiCollective: sums and results of ranks, carried by MPI. MPI adds nothing: it transfers parts, which are added here
// in rank order, so that the bits do not depend on the transport.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/mpi/mpi_group.h"

namespace llmc {

// Thread 0 of a rank does all the work, because the network dominates the time.
class MpiCollective final : public Collective {
 public:
  // ranks_of_stage: as the channel kSums is divided.
  MpiCollective(std::shared_ptr<MpiGroup> group, uint32_t ranks_of_stage)
      : group_(std::move(group)), ranks_of_stage_(ranks_of_stage) {}

  uint32_t rank() const override { return group_->rank(); }
  uint32_t num_ranks() const override { return group_->num_ranks(); }
  uint32_t ranks_of_stage() const override { return ranks_of_stage_; }
  void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) override;
  void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) override;
  void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) override;
  Status status() const override { return group_->status(); }

 private:
  bool GatherAll(const float* from, uint64_t count);
  bool SumByParts(const float* from, uint64_t count);

  std::shared_ptr<MpiGroup> group_;
  uint32_t ranks_of_stage_;
  // Of a piece. They outlive what a failure has left unfinished.
  std::vector<float> given_;  // by rank
  std::vector<float> sums_;
  std::vector<int> bytes_, offsets_, own_bytes_, own_offsets_;
};

}  // namespace llmc
