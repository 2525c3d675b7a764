// Group: the ranks that run an artifact together, as one of them sees the others, whatever carries what they say.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "collective/collective.h"
#include "core/status.h"

namespace llmc {

constexpr uint32_t kMostRanks = 256;

// What is said is heard by every other rank, in the order in which it was said. One thread at a time speaks or hears.
class Group {
 public:
  virtual ~Group() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;
  virtual const char* transport() const = 0;

  // Of rank 0. Waits where a rank lags far behind; an error once a rank has failed.
  virtual Status Say(const void* data, uint64_t bytes) = 0;
  // Of another rank: the next bytes, as many as were said at once. Spins for spin_ns before it sleeps.
  virtual Status Hear(void* data, uint64_t bytes, uint64_t spin_ns) = 0;

  // Of another rank: its device stands.
  virtual Status TellLoaded() = 0;
  // Of rank 0: until the devices of all others stand; an error once a rank has failed.
  virtual Status AwaitLoaded() = 0;
  // This rank ends as it should, and the others do.
  virtual void Leave() = 0;
  // Of rank 0: until all others have left, but not for long.
  virtual void AwaitLeft() = 0;

  // Tells all ranks that one has failed. The first failure stays.
  virtual void Fail(uint32_t rank, const std::string& why) = 0;
  virtual bool failed() const = 0;
  // An error once a rank has failed: which one, and why.
  virtual Status status() const = 0;

  // What the commands of a device call; one at a time is used.
  virtual std::shared_ptr<Collective> NewCollective() = 0;
};

}  // namespace llmc
