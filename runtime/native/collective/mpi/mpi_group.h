// MpiGroup: ranks started by mpirun, on any hosts.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/group.h"
#include "collective/mpi/mpi_library.h"
#include "collective/mpi/rank_links.h"

namespace llmc {

class MpiGroup final : public Group, public std::enable_shared_from_this<MpiGroup> {
 public:
  // library: MPI of the mpirun that started this process. num_ranks: required number of ranks, 0: any. Returns once all
  // ranks have joined. Call it once per process.
  static Status Open(const std::string& library, uint32_t num_ranks, std::shared_ptr<Group>* out);

  uint32_t rank() const override { return mpi_->rank(); }
  uint32_t num_ranks() const override { return mpi_->num_ranks(); }
  const char* transport() const override { return "mpi"; }
  Status Say(const void* data, uint64_t bytes) override;
  Status Hear(void* data, uint64_t bytes, uint64_t spin_ns) override;
  Status TellLoaded() override { return Meet(kNoLimit); }
  Status AwaitLoaded() override { return Meet(kNoLimit); }
  void Leave() override;
  void AwaitLeft() override {}  // Leave waits for the others
  void Fail(uint32_t rank, const std::string& why) override { links_->Fail(rank, why); }
  bool failed() const override { return links_->failed(); }
  Status status() const override { return links_->status(); }
  std::shared_ptr<Collective> NewCollective(uint32_t ranks_of_stage, uint64_t outbox_bytes) override;

  MpiLibrary& mpi() { return *mpi_; }
  // Waits for an operation, spinning for spin_ns before it sleeps; an error once a rank has failed. After most_ns this
  // rank fails itself.
  Status Await(const Status& begun, MpiRequest* request, uint64_t spin_ns, uint64_t most_ns = kNoLimit);
  // The same for what `move` moves on until it sets done; an error of it fails this rank.
  Status AwaitMoves(const std::function<Status(bool* done)>& move, uint64_t spin_ns, uint64_t most_ns = kNoLimit);

 private:
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  MpiGroup(std::unique_ptr<MpiLibrary> mpi, std::unique_ptr<RankLinks> links)
      : mpi_(std::move(mpi)), links_(std::move(links)) {}
  // What was said to ranks of later stages that have not heard it yet.
  struct Said {
    std::vector<char> text;
    std::vector<MpiRequest> sends;
  };

  bool has_stages() const { return ranks_of_stage_ < num_ranks(); }
  Status Broadcast(void* data, uint64_t bytes, uint64_t spin_ns);
  Status SayToStages(const char* data, uint64_t bytes);
  Status ForgetHeard();
  Status Meet(uint64_t most_ns);

  std::unique_ptr<MpiLibrary> mpi_;
  std::unique_ptr<RankLinks> links_;
  uint32_t ranks_of_stage_ = UINT32_MAX;  // until ranks are divided among stages
  std::deque<Said> said_;
};

}  // namespace llmc
