// CuNccl: what the ranks of a stage gather goes from GPU to GPU, by NCCL. It never adds: sums have the order of ranks.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "collective/collective.h"
#include "core/status.h"
#include "device/cuda/cu_handles.h"
#include "device/cuda/nccl_library.h"

namespace llmc {

enum class CollectiveWay : uint32_t { kAuto, kHost, kNccl };
constexpr const char* kCollectiveWays[] = {"auto", "host", "nccl"};  // in the order of CollectiveWay

struct NcclChoice {
  CollectiveWay way = CollectiveWay::kAuto;  // kAuto: NCCL where all ranks can use it
  std::string library = kNcclLibrary;
};

// Why ranks exchange results by the host, as statistics have it.
enum class NcclRefusal : uint32_t { kNone, kChosen, kNoLibrary, kSameGpu, kVersions };

class CuNccl {
 public:
  // Call on all ranks of a stage, in a scope of the machine. They agree: *out is empty on all ranks where the host
  // exchanges results, for the reason in *refusal. An error where `choice` leaves no other way.
  static Status Join(const CuMachinePtr& machine, const NcclChoice& choice, std::shared_ptr<Collective> ranks,
                     std::shared_ptr<const CuNccl>* out, NcclRefusal* refusal);
  // Waits for no other rank. What the ranks gather must have ended, and graphs that do so be destroyed.
  ~CuNccl();
  CuNccl(const CuNccl&) = delete;
  CuNccl& operator=(const CuNccl&) = delete;

  uint32_t num_ranks() const { return ranks_->ranks_of_stage(); }
  // Enqueues: `count` floats of each rank lie at `to`, one rank behind the other. All ranks call it in the same order.
  Status AllGather(CuPointer from, CuPointer to, uint64_t count, CuStreamHandle stream) const;
  // Waits until query() is not kCuNotReady, and gives its code. Once a rank or NCCL has failed, gives an error, behind
  // which no rank is waited for any more.
  template <class Query>
  Status Await(Query query, CuResult* code) const {
    for (uint64_t turns = 0; (*code = query()) == kCuNotReady; ++turns) {
      LLMC_RETURN_IF_ERROR(OrAbort(Check()));
      if (turns > kSpins) std::this_thread::yield();
    }
    return aborted_ ? Check() : Status::Ok();
  }

 private:
  static constexpr uint64_t kSpins = 1000;

  CuNccl(CuMachinePtr machine, std::shared_ptr<const NcclLibrary> library, std::shared_ptr<Collective> ranks)
      : machine_(std::move(machine)), library_(std::move(library)), ranks_(std::move(ranks)) {}
  Status Open(const NcclId& id);
  // An error once a rank or NCCL has failed.
  Status Check() const;
  Status OrAbort(Status status) const;
  // Waits for a call that has begun.
  Status Settle(const char* doing, NcclResult code) const;

  CuMachinePtr machine_;
  std::shared_ptr<const NcclLibrary> library_;
  std::shared_ptr<Collective> ranks_;
  NcclComm comm_ = nullptr;
  mutable Status failed_;  // kept once aborted
  mutable bool aborted_ = false;
  mutable std::thread aborting_;
};

// Waits for a stream's work, and gives the code of its end. nccl: of what the stream gathers; nullptr: nothing.
Status AwaitStream(const CuMachine& machine, const CuNccl* nccl, CuStreamHandle stream, CuResult* code);

}  // namespace llmc
