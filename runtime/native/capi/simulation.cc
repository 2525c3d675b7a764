// llmc_engine_create_simulated and its functions: the C boundary of the simulation.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "capi/c_engine.h"
#include "core/c_struct.h"
#include "core/error.h"
#include "device/simulated/simulation.h"

namespace {

using llmc::NullArgument;
using llmc::Status;

// Size of a simulated vocabulary: small, since each step makes logits of all tokens, but large enough to tell blocks of
// tokens apart.
constexpr int32_t kVocab = 256;

Status Refused(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

bool IsTime(double ns) { return std::isfinite(ns) && ns >= 0; }

Status ReadCost(const llmc_sim_cost* from, const std::string& name, llmc::ReplayCost* to) {
  llmc_sim_cost c{};
  LLMC_RETURN_IF_ERROR(llmc::ReadStruct(from, name.c_str(), &c));
  if (c.num_points == 0 || c.tokens == nullptr || c.ns == nullptr) {
    return Refused("The " + name + " has no point; give one at least.");
  }
  to->tokens.assign(c.tokens, c.tokens + c.num_points);
  to->ns.assign(c.ns, c.ns + c.num_points);
  to->ns_per_pair = c.ns_per_pair;
  const bool ascends =
      std::adjacent_find(to->tokens.begin(), to->tokens.end(), std::greater_equal<uint32_t>()) == to->tokens.end();
  if (!ascends || !IsTime(c.ns_per_pair) || !std::all_of(to->ns.begin(), to->ns.end(), IsTime)) {
    return Refused("The " + name + " is not a curve; give ascending tokens and times of 0 or more.");
  }
  return Status::Ok();
}

Status ReadModel(const llmc_sim_model& m, llmc::ModelShape* shape, std::vector<llmc::SimulatedGraph>* graphs) {
  if (m.num_graphs == 0 || m.graphs == nullptr) return Refused("The model has no graphs; give one at least.");
  if (!IsTime(m.step_ns) || !IsTime(m.token_ns)) return Refused("step_ns and token_ns must be 0 or more.");
  if (m.stages > llmc::kMostSimulatedStages || m.steps_in_flight > llmc::kMostSimulatedStages) {
    return Refused("stages and steps_in_flight must be 0 to 64.");
  }
  if (!IsTime(m.draft_ns) || !IsTime(m.read_ns)) return Refused("draft_ns and read_ns must be 0 or more.");
  if (!(m.bus_share >= 0 && m.bus_share <= 1)) return Refused("bus_share must be 0 to 1.");
  if (!(m.guess_odds >= 0 && m.guess_odds <= 1)) return Refused("guess_odds must be 0 to 1.");
  shape->num_layers = 1;
  shape->block_size = m.block_size;
  shape->vocab_size = kVocab;
  shape->max_model_len = m.max_model_len;
  shape->max_num_seqs = m.max_num_seqs;
  shape->kv_block_bytes = m.kv_block_bytes;
  shape->state_bytes = m.state_bytes;
  const uint32_t stride = m.graphs[0].struct_size;
  for (uint32_t i = 0; i < m.num_graphs; ++i) {
    const std::string name = "graphs[" + std::to_string(i) + "]";
    const char* at = reinterpret_cast<const char*>(m.graphs) + static_cast<size_t>(i) * stride;
    llmc_sim_graph g{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(reinterpret_cast<const llmc_sim_graph*>(at), name.c_str(), &g));
    const uint32_t least = std::min({g.max_tokens, g.max_seqs, g.max_samples, g.max_blocks_per_seq});
    if (g.phase > 2 || least == 0) return Refused(name + " has a phase above 2 or a limit of 0; no step fits it.");
    if (g.max_blocks != 0 && (g.phase != 1 || g.max_blocks < std::max(g.max_seqs, g.max_blocks_per_seq))) {
      return Refused(name + " has max_blocks " + std::to_string(g.max_blocks) +
                     "; only decode graphs have them, one for each sequence and those of the longest at least.");
    }
    shape->graphs.push_back({static_cast<llmc::Phase>(g.phase), g.batch, g.seq, g.max_tokens, g.max_seqs, g.max_samples,
                             g.max_blocks_per_seq, g.max_blocks});
    graphs->emplace_back();
    LLMC_RETURN_IF_ERROR(ReadCost(g.cost, name + ".cost", &graphs->back().cost));
    LLMC_RETURN_IF_ERROR(ReadCost(g.exact, name + ".exact", &graphs->back().exact));
  }
  return Status::Ok();
}

Status CheckTrace(const llmc_sim_trace& t, const llmc::ModelShape& model) {
  if (t.num_requests == 0) return Refused("The trace is empty; give one request at least.");
  if (t.arrival_ns == nullptr || t.prompt_tokens == nullptr || t.output_tokens == nullptr) {
    return NullArgument("arrival_ns, prompt_tokens or output_tokens");
  }
  if (t.prefix_start != nullptr && (t.prefix_ids == nullptr || t.prefix_block == 0)) {
    return Refused("prefix_start is given without prefix_ids or prefix_block; give all three.");
  }
  for (uint64_t i = 0; i < t.num_requests; ++i) {
    const std::string name = "Request " + std::to_string(i) + " of the trace";
    if (i > 0 && t.arrival_ns[i] < t.arrival_ns[i - 1]) return Refused(name + " arrives before the one before it.");
    if (t.output_tokens[i] == 0) return Refused(name + " has no output token; give one at least.");
    if (t.prompt_tokens[i] == 0 || t.prompt_tokens[i] >= static_cast<uint32_t>(model.max_model_len)) {
      return Refused(name + " has a prompt of " + std::to_string(t.prompt_tokens[i]) + " tokens; use 1 to " +
                     std::to_string(model.max_model_len - 1) + ".");
    }
    if (t.prefix_start != nullptr && t.prefix_start[i] > t.prefix_start[i + 1]) {
      return Refused(name + " has prefix ids that end before they begin.");
    }
  }
  return Status::Ok();
}

}  // namespace

extern "C" {

llmc_status llmc_engine_create_simulated(const llmc_sim_model* model, const llmc_engine_options* options,
                                         llmc_engine** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (out == nullptr) return NullArgument("out");
    llmc_sim_model m{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(model, "model", &m));
    llmc::ModelShape shape{};
    std::vector<llmc::SimulatedGraph> graphs;
    LLMC_RETURN_IF_ERROR(ReadModel(m, &shape, &graphs));
    llmc::SimulatedDevice* simulated = nullptr;
    const auto make = [&](const llmc_engine_options&, const llmc::PoolCounts& counts,
                          std::unique_ptr<llmc::Device>* device) {
      llmc::SimulatedTimes times;
      times.step_ns = m.step_ns;
      times.token_ns = m.token_ns;
      times.odds = m.guess_odds;
      times.draft_ns = m.draft_ns;
      times.stages = std::max(m.stages, 1u);
      times.steps_in_flight = m.steps_in_flight == 0 ? times.stages : m.steps_in_flight;
      times.bus_share = m.bus_share;
      times.read_ns = m.read_ns;
      auto made = std::make_unique<llmc::SimulatedDevice>(shape, std::move(graphs), counts, times);
      simulated = made.get();
      *device = std::move(made);
      return Status::Ok();
    };
    std::unique_ptr<llmc_engine> engine;
    LLMC_RETURN_IF_ERROR(llmc::MakeEngine(shape, options, make, &engine));
    engine->simulated = simulated;
    *out = engine.release();
    return Status::Ok();
  });
}

llmc_status llmc_engine_simulate(llmc_engine* engine, const llmc_sim_trace* trace, uint64_t* first_token_ns,
                                 uint64_t* last_token_ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (first_token_ns == nullptr || last_token_ns == nullptr) return NullArgument("first_token_ns or last_token_ns");
    if (engine->simulated == nullptr) {
      return Refused("The engine is not simulated; make it with llmc_engine_create_simulated.");
    }
    llmc_sim_trace t{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(trace, "trace", &t));
    LLMC_RETURN_IF_ERROR(CheckTrace(t, engine->simulated->model()));
    return llmc::Simulate(t, engine->engine.get(), engine->simulated, first_token_ns, last_token_ns);
  });
}

llmc_status llmc_engine_get_simulated_loads(const llmc_engine* engine, llmc_sim_load* loads, uint64_t capacity,
                                            uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(loads, "loads[0]"));
    if (engine->simulated == nullptr) {
      return Refused("The engine is not simulated; make it with llmc_engine_create_simulated.");
    }
    std::vector<llmc_sim_load> all;
    for (const llmc::SimulatedLoad& l : engine->simulated->Loads()) {
      all.push_back(
          {0, l.graph, l.num_seqs, l.length, l.replays, l.tokens, l.contexts, l.ns, l.exact_ns, l.longest, l.blocks});
    }
    llmc::WriteArray(all, std::min<uint64_t>(capacity, all.size()), loads);
    *count = all.size();
    return Status::Ok();
  });
}

}  // extern "C"
