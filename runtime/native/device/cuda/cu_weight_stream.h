// CuWeightStream: copies offloaded weights into the ring, in a stream of its own beside the kernels that read them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/status.h"
#include "device/cuda/cu_handles.h"
#include "device/cuda/cu_memory.h"
#include "device/gpu/weight_ring.h"

namespace llmc {

// The order of copies and kernels, in launches and in recordings:
//
// - A run of kernels with loads begins behind all earlier work of their stream, and so do its copies. So steps that
//   overlap, and graphs that take turns, need no order of their own: the first loads of a run wait for the last readers of
//   the run before.
// - Within a run, a load begins when the last command has ended that reads what it overwrites. Loads follow each other.
// - The first command that reads a load waits for it. It does not begin before the kernel before it has ended, either, as
//   kernels that await earlier ones may elsewhere: before they wait, they read weights. Later readers begin behind it.
// - Every load has a reader in its run. So whatever follows the run in the stream of kernels finds all copies ended.
class CuWeightStream {
 public:
  // most_loads: of any run. Memory must outlive it. Call in a scope of the machine.
  static Status Make(CuMachinePtr machine, const CuMemory& memory, size_t most_loads,
                     std::unique_ptr<CuWeightStream>* out);

  // Loads of a run while its kernels are enqueued in `kernels`, which may be captured: so are the copies then.
  class Run {
   public:
    // loads: all of them, in order.
    Run(const CuWeightStream& by, const std::vector<RingLoad>& loads, CuStreamHandle kernels)
        : by_(by), loads_(loads), kernels_(kernels) {}
    // Call before the first kernel.
    Status Begin();
    // Call before each kernel. *waits: it waits for a load.
    Status Before(size_t command, bool* waits);
    // Call behind each kernel.
    Status Behind(size_t command);

   private:
    // Enqueues loads, up to one that has to wait for a later command.
    Status EnqueueBehind(int64_t command);

    const CuWeightStream& by_;
    const std::vector<RingLoad>& loads_;
    size_t awaited_ = 0, enqueued_ = 0;  // of loads_: the next one to wait for, and to enqueue
    CuStreamHandle kernels_;
  };

  // Copies a load in the order of `stream`, for a command that runs alone.
  Status Copy(const RingLoad& load, CuStreamHandle stream) const;
  // The stream of copies. Where a run was not enqueued to its end, nobody else waits for what is left there.
  CuStreamHandle copies() const { return copies_.get(); }

 private:
  explicit CuWeightStream(CuMachinePtr machine, const CuMemory& memory)
      : machine_(std::move(machine)), memory_(memory) {}
  // The copies wait for what `kernels` has been given.
  Status AwaitKernels(CuStreamHandle kernels) const;

  CuMachinePtr machine_;
  const CuMemory& memory_;
  CuEvent read_;  // kernels have passed it
  std::vector<CuEvent> loaded_;  // [load of a run]
  CuStream copies_;  // last member, so destroyed first
};

}  // namespace llmc
