// WatchedStep: a step of a device, command by command. All memory that a tool can read is compared before and after
// each: a command changes its own operands and nothing else.
//
// What is read are the operands of the graph's commands: arena, weights, inputs, logits and hidden states. Around an
// operand lie those of other commands, which guard it. KV blocks and states are compared where a device hands them over.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "artifact/artifact.h"
#include "device/command_runner.h"
#include "device/device.h"
#include "support/check.h"

namespace llmc_test {

class WatchedStep {
 public:
  // All must outlive it. The device has a command runner.
  WatchedStep(const llmc::Artifact& artifact, llmc::Device* device)
      : artifact_(artifact), device_(*device), runner_(*device->command_runner()) {}

  // Runs the step, and returns its logits: [num_samples][output_width].
  std::vector<float> Run(const llmc::StepBatch& batch) {
    const llmc::GraphRecord& graph = artifact_.graphs()[batch.graph];
    ListParts(graph);
    ReadBlocks(&blocks_);
    ReadStates(&states_);
    CHECK_OK(runner_.Begin(batch));
    for (auto& [at, part] : parts_) Read(&part);
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const llmc::CommandRecord& command = artifact_.commands()[graph.first_command + c];
      CHECK_OK(runner_.RunCommand(c));
      Compare(command);
    }
    CompareBlocks(batch);
    CompareStates(batch);
    std::vector<float> logits(uint64_t{batch.num_samples} * device_.model().output_width());
    const auto found = parts_.find({static_cast<uint32_t>(Kind::kOutput), 0, 0});
    const uint64_t bytes = logits.size() * sizeof(float);
    if (CHECK(found != parts_.end() && found->second.bytes.size() >= bytes))
      std::memcpy(logits.data(), found->second.bytes.data(), bytes);
    return logits;
  }

 private:
  using Kind = llmc::OperandKind;
  // A range of memory, with an operand of a command that is this range.
  struct Part {
    uint32_t command, operand;
    std::vector<unsigned char> bytes;
  };
  using Place = std::tuple<uint32_t, uint32_t, uint64_t>;  // kind, index and offset of an operand

  static bool Readable(const llmc::OperandRecord& operand) {
    const auto kind = static_cast<Kind>(operand.kind);
    return kind != Kind::kKeyPool && kind != Kind::kValuePool && kind != Kind::kAdapters;
  }
  static bool Writable(const llmc::OperandRecord& operand) {
    const auto kind = static_cast<Kind>(operand.kind);
    return kind == Kind::kArena || kind == Kind::kOutput || kind == Kind::kStates;
  }

  void ListParts(const llmc::GraphRecord& graph) {
    parts_.clear();
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const llmc::CommandRecord& command = artifact_.commands()[graph.first_command + c];
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        const llmc::OperandRecord& operand = artifact_.operands()[command.first_operand + o];
        if (!Readable(operand)) continue;
        Part& part = parts_[{operand.kind, operand.index, operand.offset}];
        if (operand.bytes > part.bytes.size()) part = {c, o, std::vector<unsigned char>(operand.bytes)};
      }
    }
  }

  void Read(Part* part) {
    CHECK_OK(runner_.ReadOperand(part->command, part->operand, part->bytes.size(), part->bytes.data()));
  }

  void Compare(const llmc::CommandRecord& command) {
    for (auto& [at, part] : parts_) {
      const auto& [kind, index, offset] = at;
      Part now = part;
      Read(&now);
      std::vector<unsigned char>& before = part.bytes;
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        const llmc::OperandRecord& own = artifact_.operands()[command.first_operand + o];
        if (!Writable(own) || own.kind != kind || own.index != index) continue;
        const uint64_t begin = std::max(own.offset, offset);
        const uint64_t end = std::min(own.offset + own.bytes, offset + before.size());
        if (begin < end) std::memcpy(&before[begin - offset], &now.bytes[begin - offset], end - begin);
      }
      if (CHECK(before == now.bytes)) continue;
      const auto differs = std::mismatch(before.begin(), before.end(), now.bytes.begin()).first - before.begin();
      std::fprintf(stderr, "%s wrote beside its operands: byte %lu of kind %u, index %u\n",
                   artifact_.symbol(artifact_.kernels()[command.kernel]),
                   static_cast<unsigned long>(offset) + static_cast<unsigned long>(differs), kind, index);
      before = now.bytes;
    }
  }

  // Empty where the device hands over no blocks.
  void ReadBlocks(std::vector<std::vector<unsigned char>>* out) {
    out->clear();
    std::vector<unsigned char> block(device_.model().kv_block_bytes);
    for (uint32_t i = 0; i < device_.num_blocks(); ++i) {
      if (!device_.ReadBlock(i, block.data()).ok()) return out->clear();
      out->push_back(block);
    }
  }

  // A token's keys and values change as many bytes as they have, in the block of its slot.
  void CompareBlocks(const llmc::StepBatch& batch) {
    std::vector<std::vector<unsigned char>> now;
    ReadBlocks(&now);
    CHECK_EQ(now.size(), blocks_.size());
    const auto block_size = static_cast<uint32_t>(device_.model().block_size);
    for (uint32_t i = 0; i < now.size(); ++i) {
      if (now[i] == blocks_[i]) continue;
      const auto tokens = std::count_if(batch.slot_mapping.begin(), batch.slot_mapping.end(),
                                        [&](int32_t slot) { return static_cast<uint32_t>(slot) / block_size == i; });
      uint64_t changed = 0;
      for (size_t byte = 0; byte < now[i].size(); ++byte) changed += now[i][byte] != blocks_[i][byte] ? 1 : 0;
      if (!CHECK(changed <= static_cast<uint64_t>(tokens) * device_.model().kv_block_bytes / block_size))
        std::fprintf(stderr, "%lu bytes of KV block %u changed by %ld tokens\n", static_cast<unsigned long>(changed), i,
                     static_cast<long>(tokens));
    }
  }

  void ReadStates(std::vector<std::vector<unsigned char>>* out) {
    out->clear();
    std::vector<unsigned char> state(device_.model().state_bytes);
    for (uint32_t i = 0; i < device_.num_states(); ++i) {
      if (!device_.ReadState(i, state.data()).ok()) return out->clear();
      out->push_back(state);
    }
  }

  // Only slots that the step names change.
  void CompareStates(const llmc::StepBatch& batch) {
    std::vector<std::vector<unsigned char>> now;
    ReadStates(&now);
    CHECK_EQ(now.size(), states_.size());
    for (uint64_t i = 0; i < batch.state_slots.size(); i += llmc::kStateFields) {
      for (const int32_t slot : {batch.state_slots[i], batch.state_slots[i + 2]}) {
        if (!now.empty()) states_[static_cast<size_t>(slot)] = now[static_cast<size_t>(slot)];
      }
    }
    CHECK(now == states_);
  }

  const llmc::Artifact& artifact_;
  llmc::Device& device_;
  llmc::CommandRunner& runner_;
  std::map<Place, Part> parts_;
  std::vector<std::vector<unsigned char>> blocks_, states_;
};

}  // namespace llmc_test
