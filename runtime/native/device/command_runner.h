// CommandRunner: a step of a device one command at a time, for tools that look at what each writes.
#pragma once
#include <cstdint>

#include "core/status.h"
#include "device/batch.h"

namespace llmc {

class CommandRunner {
 public:
  virtual ~CommandRunner() = default;
  // Takes in the inputs of a step, and computes nothing yet. On an error no step was begun.
  virtual Status Begin(const StepBatch& batch) = 0;
  // Computes one command of the step's graph, to its end. A step has its results if all ran in order.
  virtual Status RunCommand(uint32_t command) = 0;
  // Copies the first bytes of an operand of a command of the step's graph; of no pool.
  virtual Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) = 0;
};

// Whether a graph of `artifact` has such an operand, of so many bytes and of no pool.
class Artifact;
Status CheckOperand(const Artifact& artifact, uint32_t graph, uint32_t command, uint32_t operand, uint64_t bytes);
Status CheckCommand(const Artifact& artifact, uint32_t graph, uint32_t command);

}  // namespace llmc
