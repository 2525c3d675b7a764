// Collective: operations that the ranks of an artifact compute together. Ranks are numbered stage by stage: a stage is
// `ranks_of_stage` ranks that share each of its layers. All ranks of a stage call the same operations in the same
// order, each with all threads of its team. Teams may differ in size.
#pragma once
#include <cstdint>

#include "core/status.h"

namespace llmc {

// A sum over the ranks of a stage: out = ((first rank + second rank + …) + bias) + residual, float32, [rows, width].
// The bits are the same on every rank and do not depend on the number of rows or threads.
struct Reduction {
  const float* in;  // of this rank; may be out
  float* out;
  const float* bias;  // [width]; nullptr: none
  const float* residual;  // [rows, width], may be out; nullptr: none
  uint64_t rows, width;
};

// Concatenates the columns of the ranks of a stage: those of its r-th rank begin at r · width / ranks_of_stage.
struct Gathering {
  const float* in;  // [rows, width / ranks_of_stage]
  float* out;  // [rows, width]
  uint64_t rows, width;
};

// What a stage hands to the next one, unchanged: its r-th rank gives, the r-th rank of the next stage takes. Behind the
// last stage comes the first. A copy lies in the outbox of the rank that gives until the other one takes it. So giving
// waits for nobody, unless something that was not taken yet lies at the same place.
struct Passing {
  float* data;  // [count]; written by the rank that takes
  uint64_t count;
  uint32_t stage;  // which gives
  uint64_t place;  // of the copy in the outbox, in bytes; the same for both ranks
};

constexpr uint32_t kNumLanes = 2;  // sums that may go on beside kernels, one in each

class Collective {
 public:
  virtual ~Collective() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;  // of all stages
  virtual uint32_t ranks_of_stage() const = 0;
  uint32_t stage() const { return rank() / ranks_of_stage(); }
  uint32_t num_stages() const { return num_ranks() / ranks_of_stage(); }
  // Called by each of num_threads threads. They synchronize before the call, and again before the next call or before
  // reading `out`. Once a rank has failed they return at once, and `out` is undefined.
  virtual void AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) = 0;
  virtual void AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) = 0;
  // Call on the ranks of both stages; on others it does nothing. Between two ranks, what is given first is taken first.
  virtual void PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) = 0;
  // Whether sums can go on beside kernels. Only then call the following, on thread 0. Each lane has its own sums, which
  // all ranks of the stage begin in the same order. AllReduce and AllGather need lane 0 to be free.
  virtual bool overlaps() const { return false; }
  // Begins a sum. Its memory is in use until FinishReduce, which waits for it. Tend moves it on.
  virtual void BeginReduce(const Reduction& work, uint32_t lane) { static_cast<void>(work), static_cast<void>(lane); }
  virtual bool Reduced(uint32_t lane) const {
    static_cast<void>(lane);
    return true;
  }
  virtual void FinishReduce(uint32_t lane) { static_cast<void>(lane); }
  // Moves on what was given or begun, if the transport needs this rank's help. Thread 0 calls it between its tasks.
  virtual void Tend() {}
  // An error once a rank has failed, which names the rank and the reason.
  virtual Status status() const = 0;

 protected:
  uint32_t first_of_stage() const { return stage() * ranks_of_stage(); }
  bool gives(const Passing& work) const { return stage() == work.stage; }
  bool takes(const Passing& work) const { return stage() == (work.stage + 1) % num_stages(); }
  // The ranks to which this one gives, and from which it takes.
  uint32_t taker() const { return (rank() + ranks_of_stage()) % num_ranks(); }
  uint32_t giver() const { return (rank() + num_ranks() - ranks_of_stage()) % num_ranks(); }
};

}  // namespace llmc
