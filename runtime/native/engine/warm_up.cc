// The engine's warm-up: replays of made-up tokens, and graphs that requests may use meanwhile.
#include <algorithm>
#include <numeric>
#include <string>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {
namespace {

Status CheckLoad(const char* what, uint32_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, std::string(what) + " of the load is " + std::to_string(value) +
                                                  ", outside " + std::to_string(low) + " … " + std::to_string(high) +
                                                  " of this graph; choose another graph or a smaller load.");
}

// A stride that reaches all of num_blocks blocks, out of memory order.
uint64_t ScatterStep(uint64_t num_blocks) {
  uint64_t step = num_blocks * 5 / 8 + 1;
  while (std::gcd(step, num_blocks) != 1) ++step;
  return step;
}

}  // namespace

uint32_t Engine::num_graphs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<uint32_t>(graph_stats_.size());
}

Status Engine::CheckGraph(uint32_t graph) const {
  const uint32_t count = num_graphs();
  if (graph < count) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, "Graph " + std::to_string(graph) + " does not exist; the artifact has " +
                                                  std::to_string(count) + ".");
}

Status Engine::WalkGraph(uint32_t graph, uint64_t* ns) {
  LLMC_RETURN_IF_ERROR(CheckGraph(graph));
  StepBatch none;
  none.graph = graph;
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  const uint64_t begin = MonotonicNs();
  device_->Reserve(none);
  device_->Visit(graph);
  if (ns != nullptr) *ns = MonotonicNs() - begin;
  return Status::Ok();
}

Status Engine::WarmDraft(uint64_t* ns) {
  if (speculator_.draft() == nullptr) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "The engine has no draft to make warm; create it with one.");
  }
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  const uint64_t begin = MonotonicNs();
  LLMC_RETURN_IF_ERROR(speculator_.WarmDraft());
  if (ns != nullptr) *ns = MonotonicNs() - begin;
  return Status::Ok();
}

Status Engine::CheckDevice(uint64_t timeout_ns) {
  constexpr uint64_t kDay = 24ull * 3600 * 1000000000;  // clocks have no time without end
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  return step_.on_its_way ? Status::Ok() : device_->CheckAlive(std::min(timeout_ns, kDay));
}

Status Engine::EnableGraph(uint32_t graph, bool on) {
  LLMC_RETURN_IF_ERROR(CheckGraph(graph));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  scheduler_.Enable(graph, on);
  return Status::Ok();
}

Status Engine::ReleaseGraph(uint32_t graph) {
  LLMC_RETURN_IF_ERROR(CheckGraph(graph));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  if (scheduler_.Enabled(graph)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "Graph " + std::to_string(graph) + " is on; turn it off before its memory is given back.");
  }
  LLMC_RETURN_IF_ERROR(Land());
  device_->Release(graph);
  return Status::Ok();
}

Status Engine::AddGraphs(const std::shared_ptr<const Artifact>& artifact) {
  std::lock_guard<std::mutex> one_at_a_time(new_graphs_mutex_);
  std::unique_ptr<NewGraphs> graphs;  // freed, with the graphs it replaced, once steps go on
  {
    std::lock_guard<std::mutex> step_lock(step_mutex_);
    LLMC_RETURN_IF_ERROR(Land());
    LLMC_RETURN_IF_ERROR(device_->NewGraphsOf(artifact, &graphs));
  }
  LLMC_RETURN_IF_ERROR(graphs->Prepare());
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  device_->Adopt(graphs.get());
  // If memory runs out here, the new graphs stay unused.
  ListGraphs();
  scheduler_.TakeNewGraphs();
  return Status::Ok();
}

// Contexts are read from scattered blocks with any contents, as serving reads them after a while. Only the dummy block
// and the dummy slot of states are written to.
Status Engine::WarmGraph(uint32_t graph, const WarmLoad& load, uint64_t* ns) {
  LLMC_RETURN_IF_ERROR(CheckGraph(graph));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  const GraphShape& g = model_.graphs[graph];
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  const auto longest = [&](uint32_t blocks) {
    return static_cast<uint32_t>(
        std::min<uint64_t>(static_cast<uint64_t>(blocks) * block_size, static_cast<uint64_t>(model_.max_model_len)));
  };
  uint32_t reach = longest(g.max_blocks_per_seq);
  const bool decode = g.phase == Phase::kDecode;
  uint32_t each = load.tokens_each, num_seqs = load.num_seqs;
  if (each == 0) {
    const uint32_t seqs = num_seqs != 0 ? num_seqs : g.phase == Phase::kPrefill ? g.max_seqs : 1;
    each = decode ? 1 : std::min(std::max(g.max_tokens / std::max(seqs, 1u), 1u), reach);
  }
  if (num_seqs == 0) num_seqs = std::min(g.max_seqs, std::max(g.max_tokens / each, 1u));
  // A total number of blocks is shared equally: the graph has a block for each of its sequences.
  if (g.max_blocks != 0) reach = std::min(reach, longest(std::max(g.max_blocks / num_seqs, 1u)));
  const uint32_t context = load.context != 0 ? load.context : decode ? std::max(reach, each) : each;
  LLMC_RETURN_IF_ERROR(CheckLoad("num_seqs", num_seqs, 1, g.max_seqs));
  LLMC_RETURN_IF_ERROR(CheckLoad("tokens_each", each, 1, g.max_tokens / num_seqs));
  LLMC_RETURN_IF_ERROR(CheckLoad("context", context, each, reach));

  StepBatch b;
  b.graph = graph;
  b.num_seqs = num_seqs;
  b.num_tokens = num_seqs * each;
  b.num_samples = std::min(g.max_samples, num_seqs);
  b.block_table_stride = (context + block_size - 1) / block_size;
  b.input_ids.assign(b.num_tokens, 0);
  const uint64_t num_entries = static_cast<uint64_t>(num_seqs) * b.block_table_stride;
  const uint64_t num_blocks = std::min<uint64_t>(num_entries, device_->num_blocks() - 1);
  const uint64_t step = ScatterStep(num_blocks);
  for (uint64_t i = 0; i < num_entries; ++i) {
    b.block_tables.push_back(static_cast<int32_t>(1 + i * step % num_blocks));
  }
  if (model_.recurrent()) b.state_slots.assign(uint64_t{num_seqs} * kStateFields, 0);
  b.context_lens.assign(b.num_seqs, static_cast<int32_t>(context));
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    b.query_start.push_back(static_cast<int32_t>(i * each));
    for (uint32_t position = context - each; position < context; ++position) {
      b.positions.push_back(static_cast<int32_t>(position));
      b.slot_mapping.push_back(static_cast<int32_t>(position % block_size));
    }
  }
  b.query_start.push_back(static_cast<int32_t>(b.num_tokens));
  for (uint32_t i = 0; i < b.num_samples; ++i) {
    b.sample_index.push_back(static_cast<int32_t>((i + 1) * each) - 1);
  }

  device_->Reserve(b);
  device_->Recall();
  const float* logits = nullptr;
  const uint64_t begin = MonotonicNs();
  LLMC_RETURN_IF_ERROR(device_->Run(b, &logits));
  if (ns != nullptr) *ns = MonotonicNs() - begin;
  return Status::Ok();
}

}  // namespace llmc
