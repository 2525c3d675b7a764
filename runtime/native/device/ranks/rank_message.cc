#include "device/ranks/rank_message.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace llmc {
namespace {

constexpr uint32_t kNumArrays = 9;
constexpr uint64_t kSpinNs = 1'000'000;  // spinning between two steps; during longer pauses of the leader a rank sleeps

struct Head {
  RankOp op;
  uint32_t values[2];
  RankLoad load;
  uint32_t graph, num_tokens, num_seqs, num_samples, block_table_stride;
  uint32_t lengths[kNumArrays];
};

template <typename Batch, typename Body>
void ForArrays(Batch& batch, Body body) {
  body(batch.input_ids), body(batch.positions), body(batch.slot_mapping), body(batch.block_tables);
  body(batch.context_lens), body(batch.query_start), body(batch.sample_index), body(batch.adapter_slots);
  body(batch.state_slots);
}

}  // namespace

Status RankSpeaker::Say(RankOp op, uint32_t first, uint32_t second) {
  Head head{};
  head.op = op;
  head.values[0] = first;
  head.values[1] = second;
  return group_->Say(&head, sizeof(head));
}

Status RankSpeaker::Say(const RankLoad& load) {
  Head head{};
  head.op = RankOp::kLoad;
  head.load = load;
  return group_->Say(&head, sizeof(head));
}

Status RankSpeaker::Say(RankOp op, const StepBatch& batch) {
  Head head{};
  head.op = op;
  head.graph = batch.graph;
  head.num_tokens = batch.num_tokens;
  head.num_seqs = batch.num_seqs;
  head.num_samples = batch.num_samples;
  head.block_table_stride = batch.block_table_stride;
  uint32_t array = 0;
  uint64_t bytes = sizeof(Head);
  ForArrays(batch, [&](const std::vector<int32_t>& values) {
    head.lengths[array++] = static_cast<uint32_t>(values.size());
    bytes += values.size() * sizeof(int32_t);
  });
  text_.resize(bytes);
  std::memcpy(text_.data(), &head, sizeof(head));
  char* at = text_.data() + sizeof(head);
  ForArrays(batch, [&at](const std::vector<int32_t>& values) {
    if (!values.empty()) std::memcpy(at, values.data(), values.size() * sizeof(int32_t));
    at += values.size() * sizeof(int32_t);
  });
  // Two messages, as the listener reads them: the first tells the length of the second.
  LLMC_RETURN_IF_ERROR(group_->Say(text_.data(), sizeof(head)));
  return group_->Say(text_.data() + sizeof(head), bytes - sizeof(head));
}

Status RankListener::Hear(RankMessage* out) {
  Head head{};
  LLMC_RETURN_IF_ERROR(group_->Hear(&head, sizeof(head), kSpinNs));
  out->op = head.op;
  std::copy(std::begin(head.values), std::end(head.values), out->values);
  out->load = head.load;
  if (head.op != RankOp::kStep && head.op != RankOp::kReserve) return Status::Ok();
  StepBatch& batch = out->batch;
  batch.graph = head.graph;
  batch.num_tokens = head.num_tokens;
  batch.num_seqs = head.num_seqs;
  batch.num_samples = head.num_samples;
  batch.block_table_stride = head.block_table_stride;
  uint64_t total = 0;
  for (const uint32_t length : head.lengths) total += length;
  values_.resize(total);
  LLMC_RETURN_IF_ERROR(group_->Hear(values_.data(), total * sizeof(int32_t), kSpinNs));
  const int32_t* at = values_.data();
  uint32_t array = 0;
  ForArrays(batch, [&](std::vector<int32_t>& values) {
    values.assign(at, at + head.lengths[array]);
    at += head.lengths[array++];
  });
  return Status::Ok();
}

}  // namespace llmc
