// MpiCollective: sums and results of ranks, carried by MPI. MPI adds nothing: it transfers parts, which are added here
// in rank order, so that the bits do not depend on the transport.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/mpi/mpi_group.h"
#include "collective/mpi/mpi_sum.h"
#include "core/mapped_file.h"

namespace llmc {

// Thread 0 of a rank does all the work, because the network dominates the time.
class MpiCollective final : public Collective {
 public:
  // ranks_of_stage: as the channels of sums are divided. outbox: memory of what this rank passes on.
  MpiCollective(std::shared_ptr<MpiGroup> group, uint32_t ranks_of_stage, Pages outbox)
      : group_(std::move(group)),
        ranks_of_stage_(ranks_of_stage),
        outbox_(std::move(outbox)),
        lanes_{SumOn(MpiChannel::kSums), SumOn(MpiChannel::kOtherSums)} {}
  // Waits until what this rank has passed on was taken: others read it from the outbox.
  ~MpiCollective() override;

  uint32_t rank() const override { return group_->rank(); }
  uint32_t num_ranks() const override { return group_->num_ranks(); }
  uint32_t ranks_of_stage() const override { return ranks_of_stage_; }
  void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) override;
  void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) override;
  void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) override;
  bool overlaps() const override { return ranks_of_stage_ > 1; }
  void BeginReduce(const Reduction& work, uint32_t lane) override;
  bool Reduced(uint32_t lane) const override { return lanes_[lane].done(); }
  void FinishReduce(uint32_t lane) override;
  void Tend() override;
  Status status() const override { return group_->status(); }

 private:
  bool GatherAll(const float* from, uint64_t count);
  MpiSum SumOn(MpiChannel channel) const {
    return {&group_->mpi(), channel, rank() - first_of_stage(), ranks_of_stage_};
  }
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
  std::array<MpiSum, kNumLanes> lanes_;
  std::vector<float> given_;  // of a piece that is gathered, by rank; outlives what a failure has left unfinished
};

}  // namespace llmc
