#include "device/gpu/graph_budget.h"

#include <algorithm>
#include <array>
#include <utility>

namespace llmc {
namespace {

uint64_t Less(uint64_t bytes, uint64_t taken) { return bytes - std::min(bytes, taken); }

// Graphs of decode, or of prompts.
struct Kind {
  std::vector<uint32_t> left;  // graphs without a recording, in order
  uint64_t share = 0, taken = 0;
};

Status Fill(uint64_t room_of_all, const Kind& other, const RecordGraph& record, Kind* kind) {
  std::vector<uint32_t> without;
  for (const uint32_t graph : kind->left) {
    const uint64_t room = std::min(Less(kind->share, kind->taken), Less(room_of_all, kind->taken + other.taken));
    uint64_t taken = 0;
    bool recorded = false;
    LLMC_RETURN_IF_ERROR(record(graph, room, &taken, &recorded));
    if (recorded) {
      kind->taken += taken;
    } else {
      without.push_back(graph);
    }
  }
  kind->left = std::move(without);
  return Status::Ok();
}

}  // namespace

void GraphBudget::Read(OptionReader* reader) {
  constexpr uint32_t kMost = 1 << 24;
  const auto read_mib = [reader](const char* name, uint64_t* out) {
    uint32_t mib = UINT32_MAX;
    reader->Number(name, kMost, &mib);
    if (mib != UINT32_MAX) *out = uint64_t{mib} << 20;
  };
  reader->Flag("eager", &eager);
  read_mib("graph_mib", &bytes);
  read_mib("graph_prompt_mib", &prompt_bytes);
  reader->Numbers("graph_order", kMost, &order);
}

// Decode comes first where a driver runs out of memory below the limit: launches are most of a decode step's time.
Status RecordWithin(const std::vector<GraphShape>& graphs, const GraphBudget& budget, const RecordGraph& record) {
  if (budget.eager) return Status::Ok();
  const auto num_graphs = static_cast<uint32_t>(graphs.size());
  std::array<Kind, 2> kinds;
  Kind &decode = kinds[0], &prompts = kinds[1];
  std::vector<bool> listed(num_graphs);
  const auto list = [&](uint32_t graph) {
    if (graph >= num_graphs || listed[graph]) return;
    listed[graph] = true;
    (graphs[graph].phase == Phase::kDecode ? decode : prompts).left.push_back(graph);
  };
  for (const uint32_t graph : budget.order) list(graph);
  for (uint32_t graph = 0; graph < num_graphs; ++graph) list(graph);
  decode.share = prompts.share = budget.bytes;
  if (budget.prompt_bytes != GraphBudget::kUndivided) {
    prompts.share = std::min(budget.prompt_bytes, budget.bytes);
    decode.share = budget.bytes - prompts.share;
  }
  for (size_t i = 0; i < kinds.size(); ++i) LLMC_RETURN_IF_ERROR(Fill(budget.bytes, kinds[1 - i], record, &kinds[i]));
  for (size_t i = 0; i < kinds.size(); ++i) {
    const Kind& other = kinds[1 - i];
    const uint64_t all = Less(budget.bytes, other.taken);
    if (!other.left.empty() || all <= kinds[i].share) continue;
    kinds[i].share = all;
    LLMC_RETURN_IF_ERROR(Fill(budget.bytes, other, record, &kinds[i]));
  }
  return Status::Ok();
}

}  // namespace llmc
