// CommandRunner: runs a step of a device command by command, for tools that inspect what each one writes.
#pragma once
#include <cstdint>

#include "core/status.h"
#include "device/batch.h"

namespace llmc {

class CommandRunner {
 public:
  virtual ~CommandRunner() = default;
  // Takes the inputs of a step and computes nothing yet. On an error no step was begun.
  virtual Status Begin(const StepBatch& batch) = 0;
  // Runs one command of the step's graph to completion. The step's results are valid once all ran in order.
  virtual Status RunCommand(uint32_t command) = 0;
  // Copies the first bytes of an operand of a command in the step's graph; not for pools.
  virtual Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) = 0;
};

// Whether a graph of `artifact` has such an operand with that many bytes that is not a pool.
class Artifact;
Status CheckOperand(const Artifact& artifact, uint32_t graph, uint32_t command, uint32_t operand, uint64_t bytes);
Status CheckCommand(const Artifact& artifact, uint32_t graph, uint32_t command);

}  // namespace llmc
