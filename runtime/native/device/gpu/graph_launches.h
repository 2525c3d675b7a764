// GraphLaunches: the commands of a graph as launches of kernels, with what ranks do together in between.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "device/gpu/launch.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

// Kernel, Place: a kernel of a kind of device, and where an operand begins.
template <class Kernel, class Place>
struct GraphLaunches {
  struct Launch {
    Kernel kernel;
    std::vector<Place> places;
    uint32_t groups, items;  // items: in a group
  };
  // Commands [begin, end), which are launches, and behind them a collective.
  struct Segment {
    size_t begin = 0, end = 0;
    const CollectiveRecord* collective = nullptr;  // nullptr: the graph ends
    size_t joint = 0;  // the command of the collective
    uint64_t place = 0;  // of what it passes on, see StageWalk::place
  };
  StepLayout inputs;
  std::vector<Launch> launches;  // [command]; empty: a command of another stage
  std::vector<Segment> segments;  // in the order in which they run

  // Memory has PlaceOf for operands. stage: whose commands run.
  template <class Programs, class Memory, class Work>
  static GraphLaunches Of(const Artifact& artifact, const GraphRecord& graph, const Programs& programs,
                          const Memory& memory, const Work& work, uint32_t stage) {
    GraphLaunches made;
    made.inputs = StepLayout::Of(graph);
    StageWalk walk(artifact, graph);
    Segment segment;
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const CommandRecord& command = artifact.commands()[graph.first_command + c];
      made.launches.push_back({});
      if (!walk.Runs(command, stage)) continue;
      Launch& launch = made.launches.back();
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        launch.places.push_back(memory.PlaceOf(artifact.operands()[command.first_operand + o], made.inputs, work));
      }
      if (const CollectiveRecord* collective = artifact.collective(command); collective != nullptr) {
        segment.collective = collective;
        segment.joint = c;
        segment.place = walk.place();
        made.segments.push_back(std::exchange(segment, {}));
        continue;
      }
      const GpuLaunch& facts = programs.launch(command.kernel);
      launch.kernel = programs.kernel(command.kernel);
      launch.groups = static_cast<uint32_t>(facts.GroupsIn(graph));
      launch.items = facts.items;
      if (segment.begin == segment.end) segment.begin = c;
      segment.end = c + 1;
    }
    if (segment.begin != segment.end) made.segments.push_back(segment);
    return made;
  }
};

}  // namespace llmc
