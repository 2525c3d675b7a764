// MpiCollective: sums and results of ranks, carried by MPI. MPI adds nothing: it transfers parts, which are added here
// in rank order, so that the bits do not depend on the transport.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/mpi/mpi_group.h"
#include "core/mapped_file.h"

namespace llmc {

// Thread 0 of a rank does all the work, because the network dominates the time.
class MpiCollective final : public Collective {
 public:
  // ranks_of_stage: as the channel kSums is divided. outbox: memory of what this rank passes on.
  MpiCollective(std::shared_ptr<MpiGroup> group, uint32_t ranks_of_stage, Pages outbox)
      : group_(std::move(group)), ranks_of_stage_(ranks_of_stage), outbox_(std::move(outbox)) {}
  // Waits until what this rank has passed on was taken: others read it from the outbox.
  ~MpiCollective() override;

  uint32_t rank() const override { return group_->rank(); }
  uint32_t num_ranks() const override { return group_->num_ranks(); }
  uint32_t ranks_of_stage() const override { return ranks_of_stage_; }
  void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) override;
  void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) override;
  void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) override;
  void Tend() override;
  Status status() const override { return group_->status(); }

 private:
  bool GatherAll(const float* from, uint64_t count);
  bool SumByParts(const float* from, uint64_t count);
  void Give(const Passing& work);
  void Take(const Passing& work);

  // A message on its way: it lies in the outbox until the request is done.
  struct Sent {
    uint64_t begin, end;  // in the outbox, in bytes
    MpiRequest request;
  };

  std::shared_ptr<MpiGroup> group_;
  uint32_t ranks_of_stage_;
  Pages outbox_;
  std::deque<Sent> sent_;  // oldest first
  // Of a piece. They outlive what a failure has left unfinished.
  std::vector<float> given_;  // by rank
  std::vector<float> sums_;
  std::vector<int> bytes_, offsets_, own_bytes_, own_offsets_;
};

}  // namespace llmc
