// DraftModel: a smaller model that guesses the next tokens of sequences, on a device with its own KV pool. It only
// affects how many guesses are right. Or it is a head: beside each token it reads the hidden state that the model left
// of the token before, or that the head guessed of it, and what it has of a text may begin anywhere.
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

// What the draft has of a sequence in its KV cache: tokens [origin, num_known) of its text, then guesses that it went on
// from.
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
  std::vector<float> last;  // of a head: the state that it guessed last
};

class DraftModel {
 public:
  // LLMC_ERR_INVALID_ARGUMENT for a model whose tokens are not those of `target`, that writes no text, or that takes
  // hidden states which the target does not leave.
  static Status Create(std::unique_ptr<Device> device, const ModelShape& target, std::unique_ptr<DraftModel>* out);

  // Tokens that the text of a sequence may have for its next one to be guessed; 0: it cannot be.
  uint32_t Reach(const Sequence& s);
  uint32_t num_blocks() const { return blocks_.num_usable(); }
  uint32_t num_free_blocks() const { return blocks_.num_free(); }
  // Floats of the hidden states that it takes; 0: none.
  uint32_t states_width() const { return model_.takes_states ? static_cast<uint32_t>(model_.states_width) : 0; }
  // Whether all but the end of its text is in the KV cache, so that guesses come at once.
  bool Knows(const Sequence& s);
  // Tokens of its text that are not there.
  uint32_t NumUnread(const Sequence& s);
  // Reads on in its text, as far as one step goes: so many tokens. None where there is no block for them.
  Status Read(const Sequence& s, uint32_t* tokens);

  // Replays each of its graphs with one made-up token, and calls each kernel for no row: its first guesses find code and
  // weights in memory. guess_ns: what a guess of one sequence takes then, the quickest of some; 0: no graph holds one.
  Status Warm(uint64_t* guess_ns);

  // Guesses of one sequence: in, how many are wanted; out, guesses[first, first + depth), fewer where blocks are short.
  struct Task {
    Sequence* sequence;
    uint32_t depth, first;
  };
  // For sequences that it knows.
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
  // The most new tokens of its text that a sequence may have for Guess to take them in.
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
  void TakeStates(const Row* rows, std::size_t count);
  Status Draw(Fence fence, std::size_t count);

  std::unique_ptr<Device> device_;
  const ModelShape& model_;
  uint32_t max_length_, block_size_;
  BlockManager blocks_;
  GraphLadder ladder_;
  Sampler sampler_;
  std::vector<DraftState*> states_;  // of all sequences that have one
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
