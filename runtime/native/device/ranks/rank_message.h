// What rank 0 tells the other ranks to do, as the group carries it.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/group.h"
#include "device/batch.h"

namespace llmc {

enum class RankOp : uint32_t { kLoad, kStep, kCopyBlock, kReserve, kVisit, kRelease, kRecall, kEnd };

// values: of kLoad num_blocks and whether it is timed, of kCopyBlock from and to, of kVisit and kRelease the graph.
struct RankMessage {
  RankOp op = RankOp::kEnd;
  uint32_t values[2] = {};
  StepBatch batch{};  // of kStep and kReserve
};

// Of rank 0.
class RankSpeaker {
 public:
  explicit RankSpeaker(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Status Say(RankOp op, uint32_t first = 0, uint32_t second = 0);
  Status Say(RankOp op, const StepBatch& batch);

 private:
  std::shared_ptr<Group> group_;
  std::vector<char> text_;  // reused
};

// Of the others.
class RankListener {
 public:
  explicit RankListener(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Status Hear(RankMessage* out);

 private:
  std::shared_ptr<Group> group_;
  std::vector<int32_t> values_;  // reused
};

}  // namespace llmc
