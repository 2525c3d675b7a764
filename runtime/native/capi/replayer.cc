// llmc_replayer_* of llmc.h.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "capi/c_device.h"
#include "capi/device_stats.h"
#include "core/c_struct.h"
#include "core/error.h"
#include "core/made_here.h"
#include "device/command_runner.h"
#include "device/replay_profile.h"

struct llmc_replayer {
  std::unique_ptr<llmc::Device> device;
  llmc::StepBatch step;  // reused by all steps
  bool begun = false;    // a step is being run command by command
  llmc::MadeHere made;
};

namespace {

using llmc::CheckStruct;
using llmc::NullArgument;
using llmc::Status;

constexpr llmc_replayer_options kReplayerDefaults = {sizeof(llmc_replayer_options), 0, 0, 0};

// Copies a caller's batch into the replayer's step. Counts are checked first: arrays are read only as far as these say.
Status ReadBatch(uint32_t graph, const llmc_batch* batch, llmc_replayer* replayer) {
  llmc_batch b{};
  LLMC_RETURN_IF_ERROR(llmc::ReadStruct(batch, "batch", &b));
  if (!b.input_ids) return NullArgument("batch->input_ids");
  if (!b.positions) return NullArgument("batch->positions");
  if (!b.slot_mapping) return NullArgument("batch->slot_mapping");
  if (!b.block_tables) return NullArgument("batch->block_tables");
  if (!b.context_lens) return NullArgument("batch->context_lens");
  if (!b.query_start) return NullArgument("batch->query_start");
  if (!b.sample_index && b.num_samples) return NullArgument("batch->sample_index");
  const llmc::Device& device = *replayer->device;
  LLMC_RETURN_IF_ERROR(
      llmc::CheckCounts(device.model(), graph, b.num_tokens, b.num_seqs, b.num_samples, b.block_table_stride));
  llmc::StepBatch& step = replayer->step;
  step.graph = graph;
  step.num_tokens = b.num_tokens, step.num_seqs = b.num_seqs, step.num_samples = b.num_samples;
  // No sequence has more blocks in this graph.
  const uint32_t stride = std::min(b.block_table_stride, device.model().graphs[graph].max_blocks_per_seq);
  step.block_table_stride = stride;
  step.input_ids.assign(b.input_ids, b.input_ids + b.num_tokens);
  step.positions.assign(b.positions, b.positions + b.num_tokens);
  step.slot_mapping.assign(b.slot_mapping, b.slot_mapping + b.num_tokens);
  step.block_tables.clear();
  for (uint64_t i = 0; i < b.num_seqs; ++i) {
    const int32_t* row = b.block_tables + i * b.block_table_stride;
    step.block_tables.insert(step.block_tables.end(), row, row + stride);
  }
  step.context_lens.assign(b.context_lens, b.context_lens + b.num_seqs);
  step.query_start.assign(b.query_start, b.query_start + b.num_seqs + 1);
  step.sample_index.assign(b.sample_index, b.sample_index + b.num_samples);
  step.state_slots.clear();
  if (b.state_slots) step.state_slots.assign(b.state_slots, b.state_slots + uint64_t{b.num_seqs} * llmc::kStateFields);
  step.rope_positions.clear();
  if (b.rope_positions) {
    step.rope_positions.assign(b.rope_positions, b.rope_positions + uint64_t{b.num_tokens} * llmc::kRopeAxes);
  }
  return Status::Ok();
}

// With the dummy slot. A model without states is refused a number of them.
uint32_t NumStates(const llmc::ModelShape& model, uint32_t chosen) {
  if (chosen != 0) return chosen == UINT32_MAX ? chosen : chosen + 1;
  if (!model.recurrent()) return 0;
  uint32_t most = 1;
  for (const llmc::GraphShape& graph : model.graphs) most = std::max(most, graph.max_seqs);
  return most + 1;
}

Status CheckReplayer(const llmc_replayer* replayer) {
  return replayer == nullptr ? NullArgument("replayer") : replayer->made.Check("replayer");
}

Status NotBegun() {
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "No step was begun; call llmc_replayer_begin first.");
}

Status ProfileOf(const llmc_replayer* replayer, llmc::ReplayProfile** out) {
  *out = replayer->device->profile();
  if (*out != nullptr) return Status::Ok();
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device does not measure its replays; time them from outside.");
}

}  // namespace

extern "C" {

void llmc_replayer_options_init(llmc_replayer_options* options, uint32_t struct_size) {
  llmc::InitStruct(kReplayerDefaults, struct_size, options);
}

void llmc_batch_init(llmc_batch* batch, uint32_t struct_size) {
  static const llmc_batch defaults{};
  llmc::InitStruct(defaults, struct_size, batch);
}

llmc_status llmc_replayer_create(const llmc_device* device, llmc_artifact* artifact,
                                 const llmc_replayer_options* options, llmc_replayer** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!device) return NullArgument("device");
    if (!artifact) return NullArgument("artifact");
    if (!out) return NullArgument("out");
    llmc_replayer_options chosen = kReplayerDefaults;
    if (options) LLMC_RETURN_IF_ERROR(llmc::ReadStruct(options, "options", &chosen));
    const llmc::ModelRecord& model = artifact->artifact->model();
    uint32_t blocks = chosen.num_blocks;
    if (blocks == 0) blocks = static_cast<uint32_t>(model.max_model_len - 1) / model.block_size + 1;
    if (blocks == UINT32_MAX) --blocks;  // room for the dummy block; rejected below as too many
    auto replayer = std::make_unique<llmc_replayer>();
    const uint32_t states = NumStates(artifact->artifact->shape(), chosen.num_states);
    LLMC_RETURN_IF_ERROR(
        device->device->Load(artifact->artifact, {blocks + 1, states, /*timed=*/true}, &replayer->device));
    *out = replayer.release();
    return Status::Ok();
  });
}

void llmc_replayer_destroy(llmc_replayer* replayer) {
  if (replayer != nullptr && replayer->made.here()) delete replayer;
}

llmc_status llmc_replayer_copy_state(llmc_replayer* replayer, uint32_t from, uint32_t to, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    LLMC_RETURN_IF_ERROR(replayer->device->CopyState(from, to));
    return replayer->device->AwaitCopies();
  });
}

llmc_status llmc_replayer_run(llmc_replayer* replayer, uint32_t graph, const llmc_batch* batch, float* logits,
                              uint64_t capacity, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    LLMC_RETURN_IF_ERROR(ReadBatch(graph, batch, replayer));
    replayer->begun = false;
    llmc::Device& device = *replayer->device;
    const llmc::StepBatch& step = replayer->step;
    if (!logits && step.num_samples) return NullArgument("logits");
    const uint64_t needed = step.num_samples * uint64_t{device.model().output_width()};
    if (capacity < needed) {
      return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "logits has room for " + std::to_string(capacity) +
                                                          " floats and the batch needs " + std::to_string(needed) +
                                                          "; pass a larger array");
    }
    LLMC_RETURN_IF_ERROR(device.BeforeStep());
    const float* result = nullptr;
    LLMC_RETURN_IF_ERROR(device.Run(step, &result));
    if (needed) std::memcpy(logits, result, needed * sizeof(float));
    return Status::Ok();
  });
}

llmc_status llmc_replayer_begin(llmc_replayer* replayer, uint32_t graph, const llmc_batch* batch, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    LLMC_RETURN_IF_ERROR(ReadBatch(graph, batch, replayer));
    replayer->begun = false;
    llmc::CommandRunner* runner = replayer->device->command_runner();
    if (runner == nullptr) {
      return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                           "This device runs whole graphs; look at another device's commands.");
    }
    LLMC_RETURN_IF_ERROR(runner->Begin(replayer->step));
    replayer->begun = true;
    return Status::Ok();
  });
}

llmc_status llmc_replayer_run_command(llmc_replayer* replayer, uint32_t command, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    if (!replayer->begun) return NotBegun();
    return replayer->device->command_runner()->RunCommand(command);
  });
}

llmc_status llmc_replayer_read_operand(llmc_replayer* replayer, uint32_t command, uint32_t operand, void* out,
                                       uint64_t bytes, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    if (!out && bytes) return NullArgument("out");
    if (!replayer->begun) return NotBegun();
    return replayer->device->command_runner()->ReadOperand(command, operand, bytes, out);
  });
}

llmc_status llmc_replayer_set_profiling(llmc_replayer* replayer, uint32_t on, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    llmc::ReplayProfile* profile = nullptr;
    LLMC_RETURN_IF_ERROR(ProfileOf(replayer, &profile));
    profile->SetProfiling(on != 0);
    return Status::Ok();
  });
}

llmc_status llmc_replayer_get_stats(const llmc_replayer* replayer, llmc_replay_stats* stats, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    LLMC_RETURN_IF_ERROR(CheckStruct(stats, "stats"));
    llmc::ReplayProfile* profile = nullptr;
    LLMC_RETURN_IF_ERROR(ProfileOf(replayer, &profile));
    const llmc::ReplayStats& from = profile->stats();
    llmc_replay_stats value{};
    value.num_threads = profile->num_threads();
    value.num_replays = from.num_replays;
    value.total_ns = from.total_ns;
    value.kernel_ns = from.kernel_ns;
    value.barrier_ns = from.barrier_ns;
    std::copy(from.family_ns.begin(), from.family_ns.end(), value.family_ns);
    llmc::WriteStruct(value, stats->struct_size, stats);
    return Status::Ok();
  });
}

llmc_status llmc_replayer_get_device_stats(const llmc_replayer* replayer, llmc_device_stat* stats, uint64_t capacity,
                                           uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    std::vector<llmc::DeviceStat> all;
    replayer->device->GetStats(&all);
    return llmc::GiveDeviceStats(all, stats, capacity, count);
  });
}

llmc_status llmc_replayer_get_command_times(const llmc_replayer* replayer, uint32_t thread, uint64_t* start_ns,
                                            uint64_t* end_ns, uint64_t* leave_ns, uint64_t capacity, uint64_t* count,
                                            llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckReplayer(replayer));
    if (!count) return NullArgument("count");
    if (capacity && (!start_ns || !end_ns || !leave_ns)) return NullArgument("start_ns, end_ns or leave_ns");
    llmc::ReplayProfile* profile = nullptr;
    LLMC_RETURN_IF_ERROR(ProfileOf(replayer, &profile));
    if (thread >= profile->num_threads()) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "thread " + std::to_string(thread) +
                                                      " does not exist; the team has " +
                                                      std::to_string(profile->num_threads()));
    }
    const uint32_t commands = profile->num_profiled();
    if (commands == 0) {
      return Status::Error(LLMC_ERR_NOT_FOUND,
                           "the last replay was not profiled; call llmc_replayer_set_profiling before it");
    }
    if (capacity < commands) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + " but the graph has " +
                                                      std::to_string(commands) + " commands; pass larger arrays");
    }
    for (uint32_t i = 0; i < commands; ++i) {
      const llmc::CommandTime time = profile->Profiled(thread, i);
      start_ns[i] = time.start, end_ns[i] = time.end, leave_ns[i] = time.leave;
    }
    *count = commands;
    return Status::Ok();
  });
}

}  // extern "C"
