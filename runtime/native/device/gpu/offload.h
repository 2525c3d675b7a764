// Offload: which weights of a rank stay in the host's memory, and the ring through which they are streamed.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "device/gpu/file_runs.h"
#include "device/gpu/weight_ring.h"

namespace llmc {

struct OffloadOptions {
  static constexpr uint64_t kFitting = UINT64_MAX;

  uint64_t bytes = 0;  // device memory that this saves: weights of the host, less the ring
  // Device memory of the ring; 0: kernels read all offloaded weights in place. kFitting: what the graphs need, but at most
  // a quarter of the offloaded weights.
  uint64_t ring_bytes = kFitting;
};

class Offload {
 public:
  Offload() = default;
  // Takes weights until enough is saved or no more are left, the last ones of the file first in each of these groups:
  //
  // 1. embeddings and experts: a step reads rows of them, or those that tokens choose, in place;
  // 2. weights that linear layers read whole, which are streamed;
  // 3. such ones with more than an eighth of the bytes to save, for the ring has to hold two; and all others, which many
  //    groups of a kernel may read, as rotations do their table.
  //
  // Vectors stay on the device, such as weights of norms and biases: they are small, and each would be a copy of its own.
  static Offload Of(const Artifact& artifact, uint32_t rank, const OffloadOptions& options);

  uint64_t bytes() const { return bytes_; }  // of offloaded weights
  uint64_t ring_bytes() const { return ring_bytes_; }
  // In the memory of the device, and of the host.
  const FileRuns& stay() const { return stay_; }
  const FileRuns& leave() const { return leave_; }
  // Where weights lie on the host, as operands name them.
  const std::vector<HostWeight>& host_weights() const { return host_weights_; }

 private:
  explicit Offload(std::vector<const WeightRecord*> named) : named_(std::move(named)) {}
  // Takes weights until at least that many bytes are taken. order: all that may be taken. False: no more are left.
  bool Take(const std::vector<const WeightRecord*>& order, uint64_t bytes);
  uint64_t FittingRing(const Artifact& artifact, uint32_t stage) const;

  std::vector<const WeightRecord*> named_;  // weights of the rank, as operands name them; nullptr: of other ranks
  uint64_t bytes_ = 0, ring_bytes_ = 0;
  FileRuns stay_, leave_;
  std::vector<HostWeight> host_weights_;
};

}  // namespace llmc
