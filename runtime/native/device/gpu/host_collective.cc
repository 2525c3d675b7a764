#include "device/gpu/host_collective.h"

#include <algorithm>

namespace llmc {

HostCollective::HostCollective(const CollectiveRecord& record, const StepRows& rows, Collective* ranks, uint64_t place)
    : record_(record),
      ranks_(ranks),
      rows_(record.rows == static_cast<uint32_t>(CollectiveRows::kTokens) ? rows.tokens : rows.samples),
      place_(place) {
  const uint64_t whole = rows_ * record.width;
  if (record.op == static_cast<uint32_t>(CollectiveOp::kPassOn)) {
    Add(whole);
    writes_ = ranks->stage() != record.stage;
    num_read_ = writes_ ? 0 : 1;
    return;
  }
  Add(record.op == static_cast<uint32_t>(CollectiveOp::kAllGather) ? whole / ranks->ranks_of_stage() : whole);
  if ((record.adds & kAddsBias) != 0) Add(record.width);
  if ((record.adds & kAddsResidual) != 0) Add(whole);
  num_read_ = num_operands_;
  Add(whole);
}

void HostCollective::Run(float* host) const {
  float* out = host + begins_[result()];
  if (record_.op == static_cast<uint32_t>(CollectiveOp::kPassOn)) {
    ranks_->PassOn({out, rows_ * record_.width, record_.stage, place_}, 0, 1);
    return;
  }
  if (record_.op == static_cast<uint32_t>(CollectiveOp::kAllGather)) {
    ranks_->AllGather({host, out, rows_, record_.width}, 0, 1);
    return;
  }
  uint32_t next = 1;
  const float* bias = (record_.adds & kAddsBias) != 0 ? host + begins_[next++] : nullptr;
  const float* residual = (record_.adds & kAddsResidual) != 0 ? host + begins_[next++] : nullptr;
  ranks_->AllReduce({host, out, bias, residual, rows_, record_.width}, 0, 1);
}

uint64_t HostCollective::MostFloats(const Artifact& artifact) {
  uint64_t rows = 0, most = 0;
  for (const GraphRecord& graph : artifact.graphs()) {
    rows = std::max<uint64_t>({rows, graph.max_tokens, graph.max_samples});
  }
  for (const CollectiveRecord& one : artifact.collectives()) {
    // Input, result and residual; or a bias. What is gathered has an input of one rank, and nothing added.
    const bool reduces = one.op == static_cast<uint32_t>(CollectiveOp::kAllReduce);
    most = std::max<uint64_t>(most, (reduces ? kMostOperands - 1 : 2) * rows * one.width + one.width);
  }
  return most;
}

}  // namespace llmc
