// GraphLaunches: the commands of a graph as launches of kernels.
#pragma once
#include <cstdint>
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
  StepLayout inputs;
  std::vector<Launch> launches;  // [command]

  // Memory has PlaceOf for operands.
  template <class Programs, class Memory, class Work>
  static GraphLaunches Of(const Artifact& artifact, const GraphRecord& graph, const Programs& programs,
                          const Memory& memory, const Work& work) {
    GraphLaunches made;
    made.inputs = StepLayout::Of(graph);
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const CommandRecord& command = artifact.commands()[graph.first_command + c];
      const GpuLaunch& facts = programs.launch(command.kernel);
      made.launches.push_back(
          {programs.kernel(command.kernel), {}, static_cast<uint32_t>(facts.GroupsIn(graph)), facts.items});
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        made.launches.back().places.push_back(
            memory.PlaceOf(artifact.operands()[command.first_operand + o], made.inputs, work));
      }
    }
    return made;
  }
};

}  // namespace llmc
