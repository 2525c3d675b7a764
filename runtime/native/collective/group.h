// Group: the ranks that run an artifact together, as seen by one of them, over any transport.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "collective/collective.h"
#include "core/status.h"

namespace llmc {

constexpr uint32_t kMostRanks = 256;

// Every other rank hears what is said, in order. One thread at a time speaks or hears.
class Group {
 public:
  virtual ~Group() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;
  virtual const char* transport() const = 0;

  // Rank 0 only. Waits if a rank lags far behind; an error once a rank has failed.
  virtual Status Say(const void* data, uint64_t bytes) = 0;
  // Other ranks only: reads the next bytes, exactly as many as one Say wrote. Spins for spin_ns before it sleeps.
  virtual Status Hear(void* data, uint64_t bytes, uint64_t spin_ns) = 0;

  // Other ranks only: reports that the device is ready.
  virtual Status TellLoaded() = 0;
  // Rank 0 only: waits until all other devices are ready; an error once a rank has failed.
  virtual Status AwaitLoaded() = 0;
  // Announces an orderly end of this rank, as the others will do.
  virtual void Leave() = 0;
  // Rank 0 only: waits a short time until all others have left.
  virtual void AwaitLeft() = 0;

  // Tells all ranks that one has failed. The first failure is kept.
  virtual void Fail(uint32_t rank, const std::string& why) = 0;
  virtual bool failed() const = 0;
  // An error once a rank has failed, which names the rank and the reason.
  virtual Status status() const = 0;

  // The collective for the commands of a device; only one is used at a time. ranks_of_stage divides num_ranks.
  // outbox_bytes: size of each rank's outbox, 0 where nothing is passed on. Both are the same on all ranks, which all call
  // this within a minute. nullptr once a rank has failed.
  virtual std::shared_ptr<Collective> NewCollective(uint32_t ranks_of_stage, uint64_t outbox_bytes) = 0;
};

}  // namespace llmc
