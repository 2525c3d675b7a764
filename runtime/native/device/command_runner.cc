#include "device/command_runner.h"

#include <string>

#include "artifact/artifact.h"

namespace llmc {
namespace {

Status OutOfRange(const std::string& what) { return Status::Error(LLMC_ERR_OUT_OF_RANGE, what); }

}  // namespace

Status CheckCommand(const Artifact& artifact, uint32_t graph, uint32_t command) {
  const uint32_t count = artifact.graphs()[graph].num_commands;
  if (command < count) return Status::Ok();
  return OutOfRange("command " + std::to_string(command) + " does not exist; the graph has " + std::to_string(count));
}

Status CheckOperand(const Artifact& artifact, uint32_t graph, uint32_t command, uint32_t operand, uint64_t bytes) {
  LLMC_RETURN_IF_ERROR(CheckCommand(artifact, graph, command));
  const CommandRecord& of = artifact.commands()[artifact.graphs()[graph].first_command + command];
  if (operand >= of.num_operands) {
    return OutOfRange("operand " + std::to_string(operand) + " does not exist; the command has " +
                      std::to_string(of.num_operands));
  }
  const OperandRecord& record = artifact.operands()[of.first_operand + operand];
  const auto kind = static_cast<OperandKind>(record.kind);
  if (kind == OperandKind::kKeyPool || kind == OperandKind::kValuePool || kind == OperandKind::kAdapters) {
    return OutOfRange("operand " + std::to_string(operand) +
                      " is a pool of the KV cache or of adapters, which is no "
                      "result of a command");
  }
  if (bytes <= record.bytes) return Status::Ok();
  return OutOfRange("operand " + std::to_string(operand) + " has " + std::to_string(record.bytes) +
                    " bytes, fewer than " + std::to_string(bytes));
}

}  // namespace llmc
