// llmc_artifact_* and llmc_replayer_* of llmc.h.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "artifact/artifact.h"
#include "core/c_struct.h"
#include "core/error.h"
#include "device/cpu/cpu_device.h"

struct llmc_replayer {
  std::unique_ptr<llmc::CpuDevice> device;
};

namespace {

using llmc::CheckStruct;
using llmc::NullArgument;
using llmc::Status;

constexpr llmc_replayer_options kReplayerDefaults = {sizeof(llmc_replayer_options), 0, 0, /*pin_threads=*/1,
                                                     LLMC_WEIGHTS_AUTO};

// Names of an artifact have at most 255 bytes.
void CopyName(const std::string& name, char (&out)[256]) { llmc::CopyText(name.data(), name.size(), sizeof(out), out); }

}  // namespace

extern "C" {

llmc_status llmc_artifact_open(const char* path, llmc_artifact** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!path) return NullArgument("path");
    if (!out) return NullArgument("out");
    auto handle = std::make_unique<llmc_artifact>();
    LLMC_RETURN_IF_ERROR(llmc::Artifact::Open(path, &handle->artifact));
    *out = handle.release();
    return Status::Ok();
  });
}

llmc_status llmc_artifact_verify(const llmc_artifact* artifact, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!artifact) return NullArgument("artifact");
    return artifact->artifact->Verify();
  });
}

void llmc_artifact_close(llmc_artifact* artifact) { delete artifact; }

llmc_status llmc_artifact_get_info(const llmc_artifact* artifact, llmc_artifact_info* info, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!artifact) return NullArgument("artifact");
    LLMC_RETURN_IF_ERROR(CheckStruct(info, "info"));
    const llmc::Artifact& a = *artifact->artifact;
    const llmc::ModelRecord& model = a.model();
    llmc_artifact_info value{};
    value.num_graphs = static_cast<uint32_t>(a.graphs().size());
    value.num_kernels = static_cast<uint32_t>(a.kernels().size());
    value.num_commands = static_cast<uint32_t>(a.commands().size());
    value.num_weights = static_cast<uint32_t>(a.weights().size());
    value.num_layers = model.num_layers;
    value.num_kv_heads = model.num_kv_heads;
    value.head_dim = model.head_dim;
    value.block_size = model.block_size;
    value.vocab_size = model.vocab_size;
    value.max_model_len = model.max_model_len;
    value.max_num_seqs = model.max_num_seqs;
    value.target_level = a.target().level;
    CopyName(a.target().kind, value.target_kind);
    CopyName(a.target().name, value.target_name);
    value.weight_bytes = a.weight_file().size();
    value.code_bytes = a.code_bytes();
    value.max_arena_bytes = a.max_arena_bytes();
    value.kv_block_bytes = a.shape().kv_block_bytes;
    llmc::WriteStruct(value, info->struct_size, info);
    return Status::Ok();
  });
}

llmc_status llmc_artifact_get_graph(const llmc_artifact* artifact, uint32_t index, llmc_graph_info* info,
                                    llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!artifact) return NullArgument("artifact");
    LLMC_RETURN_IF_ERROR(CheckStruct(info, "info"));
    const auto& graphs = artifact->artifact->graphs();
    if (index >= graphs.size()) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "graph " + std::to_string(index) +
                                                      " does not exist; the artifact has " +
                                                      std::to_string(graphs.size()) + " graphs");
    }
    const llmc::GraphRecord& graph = graphs[index];
    llmc_graph_info value{};
    value.phase = graph.phase;
    value.batch = graph.batch;
    value.seq = graph.seq;
    value.max_tokens = graph.max_tokens;
    value.max_seqs = graph.max_seqs;
    value.max_samples = graph.max_samples;
    value.max_blocks_per_seq = graph.max_blocks_per_seq;
    value.num_commands = graph.num_commands;
    value.arena_bytes = graph.arena_bytes;
    llmc::WriteStruct(value, info->struct_size, info);
    return Status::Ok();
  });
}

void llmc_replayer_options_init(llmc_replayer_options* options, uint32_t struct_size) {
  llmc::InitStruct(kReplayerDefaults, struct_size, options);
}

void llmc_batch_init(llmc_batch* batch, uint32_t struct_size) { llmc::InitStruct(llmc_batch{}, struct_size, batch); }

llmc_status llmc_replayer_create(llmc_artifact* artifact, const llmc_replayer_options* options, llmc_replayer** out,
                                 llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!artifact) return NullArgument("artifact");
    if (!out) return NullArgument("out");
    llmc_replayer_options chosen = kReplayerDefaults;
    if (options) LLMC_RETURN_IF_ERROR(llmc::ReadStruct(options, "options", &chosen));
    const llmc::ModelRecord& model = artifact->artifact->model();
    uint32_t blocks = chosen.num_blocks;
    if (blocks == 0) blocks = static_cast<uint32_t>(model.max_model_len - 1) / model.block_size + 1;
    if (blocks == UINT32_MAX) --blocks;  // room for the dummy block; rejected below as too many
    llmc::CpuDeviceOptions device;
    device.num_threads = chosen.num_threads;
    device.num_blocks = blocks + 1;
    device.pin = chosen.pin_threads != 0;
    LLMC_RETURN_IF_ERROR(llmc::ParseWeightMode(chosen.weight_memory, &device.weights.mode));
    auto replayer = std::make_unique<llmc_replayer>();
    LLMC_RETURN_IF_ERROR(llmc::CpuDevice::Create(artifact->artifact, device, &replayer->device));
    *out = replayer.release();
    return Status::Ok();
  });
}

void llmc_replayer_destroy(llmc_replayer* replayer) { delete replayer; }

llmc_status llmc_replayer_run(llmc_replayer* replayer, uint32_t graph, const llmc_batch* batch, float* logits,
                              uint64_t capacity, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!replayer) return NullArgument("replayer");
    llmc_batch b{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(batch, "batch", &b));
    if (!b.input_ids) return NullArgument("batch->input_ids");
    if (!b.positions) return NullArgument("batch->positions");
    if (!b.slot_mapping) return NullArgument("batch->slot_mapping");
    if (!b.block_tables) return NullArgument("batch->block_tables");
    if (!b.context_lens) return NullArgument("batch->context_lens");
    if (!b.query_start) return NullArgument("batch->query_start");
    if (!b.sample_index && b.num_samples) return NullArgument("batch->sample_index");
    if (!logits && b.num_samples) return NullArgument("logits");
    const uint64_t vocab = static_cast<uint64_t>(replayer->device->model().vocab_size);
    const uint64_t needed = b.num_samples * vocab;
    if (capacity < needed) {
      return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "logits has room for " + std::to_string(capacity) +
                                                          " floats and the batch needs " + std::to_string(needed) +
                                                          "; pass a larger array");
    }
    LLMC_RETURN_IF_ERROR(replayer->device->SettleWeights());
    const float* result = nullptr;
    LLMC_RETURN_IF_ERROR(replayer->device->Replay(
        {graph, b.num_tokens, b.num_seqs, b.num_samples, b.block_table_stride, b.input_ids, b.positions,
         b.slot_mapping, b.block_tables, b.context_lens, b.query_start, b.sample_index},
        &result));
    if (needed) std::memcpy(logits, result, needed * sizeof(float));
    return Status::Ok();
  });
}

llmc_status llmc_replayer_set_profiling(llmc_replayer* replayer, uint32_t on, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!replayer) return NullArgument("replayer");
    replayer->device->SetProfiling(on != 0);
    return Status::Ok();
  });
}

llmc_status llmc_replayer_get_stats(const llmc_replayer* replayer, llmc_replay_stats* stats, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!replayer) return NullArgument("replayer");
    LLMC_RETURN_IF_ERROR(CheckStruct(stats, "stats"));
    const llmc::ReplayStats& from = replayer->device->stats();
    llmc_replay_stats value{};
    value.num_threads = replayer->device->num_threads();
    value.num_replays = from.num_replays;
    value.total_ns = from.total_ns;
    value.kernel_ns = from.kernel_ns;
    value.barrier_ns = from.barrier_ns;
    std::copy(from.family_ns.begin(), from.family_ns.end(), value.family_ns);
    llmc::WriteStruct(value, stats->struct_size, stats);
    return Status::Ok();
  });
}

llmc_status llmc_replayer_get_command_times(const llmc_replayer* replayer, uint32_t thread, uint64_t* start_ns,
                                            uint64_t* end_ns, uint64_t* leave_ns, uint64_t capacity, uint64_t* count,
                                            llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!replayer) return NullArgument("replayer");
    if (!count) return NullArgument("count");
    if (capacity && (!start_ns || !end_ns || !leave_ns)) return NullArgument("start_ns, end_ns or leave_ns");
    const llmc::CpuDevice& device = *replayer->device;
    if (thread >= device.num_threads()) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "thread " + std::to_string(thread) + " does not exist; the team has " +
                                                      std::to_string(device.num_threads()));
    }
    const uint32_t commands = device.num_profiled();
    if (commands == 0) {
      return Status::Error(LLMC_ERR_NOT_FOUND,
                           "the last replay was not profiled; call llmc_replayer_set_profiling before it");
    }
    if (capacity < commands) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + " but the graph has " +
                                                      std::to_string(commands) + " commands; pass larger arrays");
    }
    for (uint32_t i = 0; i < commands; ++i) {
      const llmc::CommandTime time = device.Profiled(thread, i);
      start_ns[i] = time.start, end_ns[i] = time.end, leave_ns[i] = time.leave;
    }
    *count = commands;
    return Status::Ok();
  });
}

}  // extern "C"
