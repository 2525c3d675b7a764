// llmc_artifact_* of llmc.h.
#include <algorithm>
#include <iterator>
#include <memory>
#include <string>

#include "artifact/artifact.h"
#include "core/c_struct.h"
#include "core/error.h"

namespace {

using llmc::CheckStruct;
using llmc::NullArgument;
using llmc::Status;

// Names in an artifact have at most 255 bytes.
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
    value.rank_weight_bytes = a.rank_weight_bytes();
    value.code_bytes = a.code_bytes();
    value.max_arena_bytes = a.max_arena_bytes();
    value.kv_block_bytes = a.shape().kv_block_bytes;
    value.max_kv_blocks = a.shape().max_kv_blocks;
    value.state_bytes = a.shape().state_bytes;
    value.max_states = a.shape().recurrent() ? a.shape().max_states : 0;
    value.vector_width = model.vector_width;
    value.states_width = static_cast<uint32_t>(model.states_width);
    value.states_use = static_cast<uint32_t>(model.takes_states);
    value.whole_prompts = model.whole_prompts;
    value.num_adapter_linears = static_cast<uint32_t>(a.adapters().size());
    value.adapter_slots = static_cast<uint32_t>(model.adapter_slots);
    value.adapter_rank = static_cast<uint32_t>(model.adapter_rank);
    value.num_ranks = a.num_ranks();
    for (const llmc::AdapterRecord& adapter : a.adapters()) value.adapter_bytes += adapter.slot_bytes;
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
    value.max_blocks = graph.max_blocks;
    llmc::WriteStruct(value, info->struct_size, info);
    return Status::Ok();
  });
}

llmc_status llmc_artifact_get_adapter_linear(const llmc_artifact* artifact, uint32_t index, llmc_adapter_linear* info,
                                             llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (!artifact) return NullArgument("artifact");
    LLMC_RETURN_IF_ERROR(CheckStruct(info, "info"));
    const auto& adapters = artifact->artifact->adapters();
    if (index >= adapters.size()) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "layer " + std::to_string(index) +
                                                      " with a pool of adapters does not exist; the artifact has " +
                                                      std::to_string(adapters.size()));
    }
    const llmc::AdapterRecord& adapter = adapters[index];
    llmc_adapter_linear value{};
    value.columns = adapter.columns;
    value.num_parts = adapter.num_parts;
    std::copy(std::begin(adapter.rows), std::end(adapter.rows), value.rows);
    CopyName(artifact->artifact->weight_name(adapter.weight), value.name);
    llmc::WriteStruct(value, info->struct_size, info);
    return Status::Ok();
  });
}

}  // extern "C"
