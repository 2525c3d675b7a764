// Messages from rank 0 to the other ranks, carried by their group.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/group.h"
#include "device/batch.h"

namespace llmc {

enum class RankOp : uint32_t {
  kLoad,
  kStep,
  kCopyBlock,
  kCopyState,
  kReserve,
  kVisit,
  kRelease,
  kRecall,
  kTimeSums,
  kCutSteps,
  kEnd
};

// values: kCopyBlock and kCopyState: from and to; kVisit and kRelease: the graph; kCutSteps: the least rows.
// load: kLoad only, with Artifact::Identity of rank 0's.
struct RankLoad {
  uint32_t num_blocks, num_states, timed, steps_in_flight;
  uint64_t artifact;
};
struct RankMessage {
  RankOp op = RankOp::kEnd;
  uint32_t values[2] = {};
  RankLoad load{};
  StepBatch batch{};  // kStep and kReserve only
};

// Sends messages; on rank 0.
class RankSpeaker {
 public:
  explicit RankSpeaker(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Status Say(RankOp op, uint32_t first = 0, uint32_t second = 0);
  Status Say(const RankLoad& load);
  Status Say(RankOp op, const StepBatch& batch);

 private:
  std::shared_ptr<Group> group_;
  std::vector<char> text_;  // reused
};

// Receives messages; on the other ranks.
class RankListener {
 public:
  explicit RankListener(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Status Hear(RankMessage* out);

 private:
  std::shared_ptr<Group> group_;
  std::vector<int32_t> values_;  // reused
};

}  // namespace llmc
