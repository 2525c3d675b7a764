// HostCollective: what the ranks of a GPU's artifact do together, in memory of the host: operands are copied there, the
// ranks' own link combines them, and the result is copied back.
#pragma once
#include <array>
#include <cstdint>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/status.h"

namespace llmc {

// Rows of a step, the same on all ranks.
struct StepRows {
  uint64_t tokens = 0, samples = 0;
};

// A collective of one step. Operands lie one behind the other in memory of the host.
class HostCollective {
 public:
  // place: of what is passed on, see Passing.
  HostCollective(const CollectiveRecord& record, const StepRows& rows, Collective* ranks, uint64_t place);

  // Without rows no rank waits for another.
  bool empty() const { return rows_ == 0; }
  // The first operands, which Run reads.
  uint32_t num_read() const { return num_read_; }
  // The last operand, which Run writes.
  uint32_t result() const { return num_operands_ - 1; }
  bool writes() const { return writes_; }
  uint64_t begin(uint32_t operand) const { return begins_[operand]; }  // in floats
  uint64_t bytes(uint32_t operand) const { return (begins_[operand + 1] - begins_[operand]) * sizeof(float); }
  // Combines operands with the other ranks'. host: the operands, see MostFloats.
  void Run(float* host) const;

  // Host memory for any collective of an artifact, in floats.
  static uint64_t MostFloats(const Artifact& artifact);

 private:
  static constexpr uint32_t kMostOperands = 4;
  void Add(uint64_t floats) {
    begins_[num_operands_ + 1] = begins_[num_operands_] + floats;
    ++num_operands_;
  }

  const CollectiveRecord& record_;
  Collective* ranks_;
  uint64_t rows_, place_;
  uint32_t num_operands_ = 0, num_read_ = 0;
  bool writes_ = true;
  std::array<uint64_t, kMostOperands + 1> begins_{};
};

// Carries out a collective of a step. to_host(operand, bytes, to) and to_device(operand, bytes, from) enqueue copies behind
// all earlier work; wait() waits for them. host: as for HostCollective::Run; in use until the last copy has ended.
template <class ToHost, class Wait, class ToDevice>
Status JoinOnHost(const HostCollective& joint, Collective* ranks, float* host, ToHost to_host, Wait wait,
                  ToDevice to_device) {
  if (joint.empty()) return Status::Ok();
  for (uint32_t i = 0; i < joint.num_read(); ++i) {
    LLMC_RETURN_IF_ERROR(to_host(i, joint.bytes(i), host + joint.begin(i)));
  }
  // Without operands to read, too: the result of the collective before may be on its way from the same memory.
  LLMC_RETURN_IF_ERROR(wait());
  joint.Run(host);
  LLMC_RETURN_IF_ERROR(ranks->status());
  if (!joint.writes()) return Status::Ok();
  return to_device(joint.result(), joint.bytes(joint.result()), host + joint.begin(joint.result()));
}

}  // namespace llmc
