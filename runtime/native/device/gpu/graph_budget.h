// GraphBudget: which graphs of an artifact are recorded within a limit of memory. The others run as launches.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "artifact/model_shape.h"
#include "core/status.h"
#include "device/options.h"

namespace llmc {

struct GraphBudget {
  static constexpr uint64_t kUndivided = UINT64_MAX;

  bool eager = false;  // records none
  uint64_t bytes = UINT64_MAX;  // device memory of all recordings
  uint64_t prompt_bytes = kUndivided;  // of these, for graphs of prefill and mixed steps
  // Graphs by number, the first ones to record first; the others follow. Numbers that an artifact lacks are ignored,
  // since a draft may share the options of its model's device.
  std::vector<uint32_t> order{};

  // Reads the options of a device: eager, graph_mib, graph_prompt_mib, graph_order.
  void Read(OptionReader* reader);
};

// Records a graph if that takes at most `room` bytes. *taken: its bytes; without a recording it is not written.
using RecordGraph = std::function<Status(uint32_t graph, uint64_t room, uint64_t* taken, bool* recorded)>;

// Records graphs of decode, then those of prompts, each kind in the budget's order within its share. A graph that does
// not fit is left out. If one kind has all its graphs, the other one gets what it left.
Status RecordWithin(const std::vector<GraphShape>& graphs, const GraphBudget& budget, const RecordGraph& record);

}  // namespace llmc
