// DraftModel: a smaller model that guesses next tokens, on a device with its own KV pool. Its errors change only how
// many guesses are right. It may be a head: beside each token it reads a hidden state of the token before, from the
// model or its own guess. A head's KV cache may begin anywhere in a text.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"
#include "engine/block_manager.h"
#include "engine/graph_ladder.h"
#include "sampling/sampler.h"

namespace llmc {

class DraftModel;
struct Sequence;

// A sequence in the draft's KV cache: tokens [origin, num_known) of its text, then guesses that were read.
struct DraftState {
  explicit DraftState(DraftModel* of);
  ~DraftState();
  DraftState(const DraftState&) = delete;
  DraftState& operator=(const DraftState&) = delete;

  DraftModel* model;
  uint64_t last_use = 0;
  uint32_t origin = 0, num_known = 0;
  std::vector<int32_t> guessed;
  std::vector<uint32_t> blocks;
  std::vector<float> last;  // of a head: hidden state of its last guess
};

class DraftModel {
 public:
  // Returns LLMC_ERR_INVALID_ARGUMENT for a model whose tokens differ from `target`'s, that writes no text, or that
  // takes hidden states which the target does not give.
  static Status Create(std::unique_ptr<Device> device, const ModelShape& target, std::unique_ptr<DraftModel>* out);

  // Most tokens that the text of a sequence may have for its next one to be guessed; 0: it cannot be guessed.
  uint32_t Reach(const Sequence& s);
  uint32_t num_blocks() const { return blocks_.num_usable(); }
  uint32_t num_free_blocks() const { return blocks_.num_free(); }
  // Floats of a hidden state that it takes; 0: none.
  uint32_t states_width() const { return model_.takes_states ? static_cast<uint32_t>(model_.states_width) : 0; }
  // Whether all but the end of the text is in the KV cache, so that guesses need no further reading.
  bool Knows(const Sequence& s);
  // Tokens of the sequence's text that the draft has not computed.
  uint32_t NumUnread(const Sequence& s);
  // Computes the next tokens of the sequence's text, as far as one step goes. *tokens: their number; 0 if no block is
  // free.
  Status Read(const Sequence& s, uint32_t* tokens);

  // Replays each graph with one made-up token, and calls each kernel with zero rows, so that first guesses find code
  // and weights in memory. guess_ns: the shortest of some measured times of a guess; 0: no graph holds one.
  Status Warm(uint64_t* guess_ns);

  // Guesses of one sequence. depth: the number wanted; then the number made, which is smaller if blocks are short:
  // guesses[first, first + depth).
  struct Task {
    Sequence* sequence;
    uint32_t depth, first;
  };
  // Guesses for sequences that it knows.
  Status Guess(std::vector<Task>* tasks, std::vector<int32_t>* guesses);

 private:
  friend struct DraftState;
  // New tokens of a sequence in a step.
  struct Row {
    const Sequence* sequence;
    DraftState* state;
    uint32_t start, count;
    bool guess;  // the token before is a guess, too
  };
  // Most unread tokens of a text that Guess reads itself.
  static constexpr uint32_t kMostBehind = 2 * (LLMC_MAX_SPECULATE_TOKENS + 1);

  DraftModel(std::unique_ptr<Device> device, uint32_t max_length);

  DraftState* StateOf(const Sequence& s);
  void Begin(const Sequence& s, DraftState* state) const;
  uint32_t BlocksFor(uint32_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  bool Ensure(DraftState* state, uint32_t tokens);
  void AddRow(const Row& row, StepLoad* load) const;
  Status RunRows(const std::vector<Row>& rows, std::vector<int32_t>* next);
  Status RunGroup(const Row* rows, std::size_t count, const StepLoad& load, int graph, std::vector<int32_t>* next);
  void GiveStates(const Row* rows, std::size_t count);
  Status TakeStates(const Row* rows, std::size_t count, uint32_t num_tokens);
  Status Draw(Fence fence, std::size_t count);

  std::unique_ptr<Device> device_;
  const ModelShape& model_;
  uint32_t max_length_, block_size_;
  BlockManager blocks_;
  GraphLadder ladder_;
  Sampler sampler_;
  std::vector<DraftState*> states_;  // states of all sequences that have one
  uint64_t use_ = 0;
  StepBatch batch_;
  std::vector<Row> rows_;
  std::vector<std::size_t> whose_;
  std::vector<int32_t> next_;
  std::vector<SampleTask> draws_;
  std::vector<SamplingParams> params_;
  std::vector<SampleOutcome> outcomes_;
};

}  // namespace llmc
