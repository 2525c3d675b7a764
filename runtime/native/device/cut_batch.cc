#include "device/cut_batch.h"

#include <algorithm>

namespace llmc {

bool CutBatch(const BatchView& b, uint32_t cut, BatchParts* out) {
  const auto row = static_cast<int32_t>(cut);
  const int32_t* const samples_end = b.sample_index + b.num_samples;
  if (!std::is_sorted(b.sample_index, samples_end)) return false;
  const auto num_samples = static_cast<uint32_t>(std::lower_bound(b.sample_index, samples_end, row) - b.sample_index);
  // The sequence of that row, and whether it has rows in both parts.
  const int32_t* const starts_end = b.query_start + b.num_seqs + 1;
  const auto seq = static_cast<uint32_t>(std::upper_bound(b.query_start, starts_end, row) - b.query_start - 1);
  const bool in_both = b.query_start[seq] < row;
  if (in_both && !std::is_sorted(b.positions + b.query_start[seq], b.positions + b.query_start[seq + 1])) return false;

  out->first = b;
  out->first.num_tokens = cut;
  out->first.num_seqs = seq + (in_both ? 1 : 0);
  out->first.num_samples = num_samples;
  out->first_contexts.assign(b.context_lens, b.context_lens + out->first.num_seqs);
  if (in_both) out->first_contexts.back() = b.positions[cut - 1] + 1;
  out->first_starts.assign(b.query_start, b.query_start + out->first.num_seqs + 1);
  out->first_starts.back() = row;
  out->first.context_lens = out->first_contexts.data();
  out->first.query_start = out->first_starts.data();

  out->second = b;
  out->second.num_tokens = b.num_tokens - cut;
  out->second.num_seqs = b.num_seqs - seq;
  out->second.num_samples = b.num_samples - num_samples;
  out->second.input_ids += cut;
  out->second.positions += cut;
  out->second.slot_mapping += cut;
  out->second.block_tables += uint64_t{seq} * b.block_table_stride;
  out->second.context_lens += seq;
  if (b.adapter_slots != nullptr) out->second.adapter_slots += seq;
  // Kernels see by the positions in which part a state is to be kept.
  if (b.state_slots != nullptr) out->second.state_slots += uint64_t{seq} * kStateFields;
  if (b.rope_positions != nullptr) out->second.rope_positions += uint64_t{cut} * kRopeAxes;
  out->second_starts.assign(b.query_start + seq, starts_end);
  for (int32_t& start : out->second_starts) start = std::max(0, start - row);
  out->second_samples.assign(b.sample_index + num_samples, samples_end);
  for (int32_t& index : out->second_samples) index -= row;
  out->second.query_start = out->second_starts.data();
  out->second.sample_index = out->second_samples.data();
  return true;
}

}  // namespace llmc
