#include "engine/speculation/draft_model.h"

#include <algorithm>
#include <string>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {
namespace {

constexpr uint32_t kTimedGuesses = 3;
constexpr int32_t kNoToken = -1;  // no use for the row's logits
constexpr int32_t kNotRun = -2;   // no graph holds the row

// Lets texts end in guesses while these are made, and restores them in any case.
class Borrowed {
 public:
  explicit Borrowed(const std::vector<DraftModel::Task>& tasks) : tasks_(tasks) {
    for (const DraftModel::Task& task : tasks) sizes_.push_back(task.sequence->tokens.size());
  }
  ~Borrowed() {
    for (std::size_t i = 0; i < sizes_.size(); ++i) tasks_[i].sequence->tokens.resize(sizes_[i]);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  const std::vector<DraftModel::Task>& tasks_;
  std::vector<std::size_t> sizes_;
};

}  // namespace

DraftState::DraftState(DraftModel* of) : model(of) { of->states_.push_back(this); }

DraftState::~DraftState() {
  for (std::size_t i = blocks.size(); i-- > 0;) model->blocks_.Release(blocks[i]);
  model->states_.erase(std::find(model->states_.begin(), model->states_.end(), this));
}

Status DraftModel::Create(std::unique_ptr<Device> device, const ModelShape& target, std::unique_ptr<DraftModel>* out) {
  const auto refuse = [](std::string what) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(what)); };
  const ModelShape& model = device->model();
  if (model.vector_width > 0) return refuse("The draft gives vectors and writes no text; use a model that does.");
  if (model.recurrent()) {
    return refuse(
        "Layers of the draft have a state, which no guess can be taken back from; use a draft with attention in all "
        "layers.");
  }
  if (model.vocab_size != target.vocab_size) {
    return refuse("The draft has " + std::to_string(model.vocab_size) + " tokens, the model " +
                  std::to_string(target.vocab_size) + "; use a draft with the model's tokenizer.");
  }
  if (model.places_rows) {
    return refuse("The draft takes rows of images, which only its model is given; compile it without --images.");
  }
  const int32_t left = target.takes_states ? 0 : target.states_width;
  if (model.takes_states && (device->TakenStates() == nullptr || model.states_width != left)) {
    return refuse("The draft is a head that reads hidden states of " + std::to_string(model.states_width) +
                  " numbers, and the model leaves " + (left == 0 ? "none" : "some of " + std::to_string(left)) +
                  "; compile the model together with this head, by --eagle or --mtp.");
  }
  const uint64_t pool = uint64_t{device->num_blocks() - 1} * static_cast<uint32_t>(model.block_size);
  const uint32_t longest = static_cast<uint32_t>(std::min<uint64_t>(static_cast<uint32_t>(model.max_model_len), pool));
  out->reset(new DraftModel(std::move(device), longest));
  return Status::Ok();
}

DraftModel::DraftModel(std::unique_ptr<Device> device, uint32_t max_length)
    : device_(std::move(device)),
      model_(device_->model()),
      max_length_(max_length),
      block_size_(static_cast<uint32_t>(model_.block_size)),
      blocks_(device_->num_blocks(), block_size_, /*prefix_cache=*/false),
      ladder_(model_),
      sampler_(model_.vocab_size, model_.eos_token_ids) {}

// Guesses that came true are part of the text, others are dropped. A head reads them again, with the model's hidden
// states.
DraftState* DraftModel::StateOf(const Sequence& s) {
  DraftState* state = s.lookahead->draft.get();
  const uint32_t size = static_cast<uint32_t>(s.tokens.size());
  if (model_.takes_states) state->guessed.clear();
  for (const int32_t token : state->guessed) {
    if (state->num_known >= size || s.tokens[state->num_known] != token) break;
    ++state->num_known;
  }
  state->guessed.clear();
  state->num_known = std::min(state->num_known, size - 1);
  if (model_.takes_states) Begin(s, state);
  return state;
}

// A head starts anew if the states that it would continue from are gone, and when its text is full.
void DraftModel::Begin(const Sequence& s, DraftState* state) const {
  const HiddenStates& states = s.lookahead->states;
  const uint32_t size = static_cast<uint32_t>(s.tokens.size());
  const bool full = size >= state->origin + max_length_;
  if (state->origin > 0 && state->num_known > states.first() && !full) return;
  const uint32_t most = std::max(max_length_ / 2, 1u);
  state->origin = state->num_known = std::max(states.first() + 1, size - std::min(size, most));
}

// The state of the last token but one must exist; it does not if the last step of the text was on another engine.
uint32_t DraftModel::Reach(const Sequence& s) {
  const DraftState* state = StateOf(s);
  if (!model_.takes_states) return max_length_;
  const uint32_t size = static_cast<uint32_t>(s.tokens.size());
  return s.lookahead->states.end() + 1 < size || state->num_known >= size ? 0 : state->origin + max_length_;
}

uint32_t DraftModel::NumUnread(const Sequence& s) {
  return static_cast<uint32_t>(s.tokens.size()) - StateOf(s)->num_known;
}

bool DraftModel::Knows(const Sequence& s) { return NumUnread(s) <= std::min(kMostBehind, ladder_.largest_step()); }

// Takes blocks from the sequence whose last guess is longest ago, but not from those of this step.
bool DraftModel::Ensure(DraftState* state, uint32_t tokens) {
  state->last_use = use_;
  state->blocks.reserve(BlocksFor(max_length_));  // allocating below must not fail after a block was taken
  while (state->blocks.size() < BlocksFor(tokens)) {
    const uint32_t block = blocks_.Allocate();
    if (block != 0) {
      state->blocks.push_back(block);
      continue;
    }
    DraftState* oldest = nullptr;
    for (DraftState* other : states_) {
      const bool older = oldest == nullptr || other->last_use < oldest->last_use;
      if (!other->blocks.empty() && other->last_use < use_ && older) oldest = other;
    }
    if (oldest == nullptr) return false;
    for (std::size_t i = oldest->blocks.size(); i-- > 0;) blocks_.Release(oldest->blocks[i]);
    oldest->blocks.clear();
    oldest->guessed.clear();
    oldest->origin = oldest->num_known = 0;
  }
  return true;
}

void DraftModel::AddRow(const Row& row, StepLoad* load) const {
  load->seqs += 1;
  load->tokens += row.count;
  load->samples += 1;
  const uint32_t blocks = BlocksFor(row.start + row.count - row.state->origin);
  load->blocks = std::max(load->blocks, blocks);
  load->all_blocks += blocks;
}

Status DraftModel::Read(const Sequence& s, uint32_t* tokens) {
  *tokens = 0;
  ++use_;
  DraftState* state = StateOf(s);
  const uint32_t left = static_cast<uint32_t>(s.tokens.size()) - state->num_known;
  const uint32_t most = std::min(left, ladder_.largest_step());
  const uint32_t before = state->num_known - state->origin;
  const uint32_t count = ladder_.Room({}, before, left + 1, most, kAnyPhase);
  if (count == 0 || !Ensure(state, before + count)) return Status::Ok();
  rows_.assign(1, {&s, state, state->num_known, count, false});
  LLMC_RETURN_IF_ERROR(RunRows(rows_, &next_));
  if (next_[0] == kNotRun) return Status::Ok();
  state->num_known += count;
  *tokens = count;
  return Status::Ok();
}

Status DraftModel::Guess(std::vector<Task>* tasks, std::vector<int32_t>* guesses) {
  ++use_;
  const Borrowed borrowed(*tasks);
  uint32_t deepest = 0;
  for (Task& task : *tasks) {
    DraftState* state = StateOf(*task.sequence);
    // The last guess is not read.
    const uint32_t size = static_cast<uint32_t>(task.sequence->tokens.size());
    if (!Ensure(state, size - state->origin + task.depth - 1)) task.depth = 0;
    deepest = std::max(deepest, task.depth);
  }
  std::vector<uint32_t> made(tasks->size());
  for (uint32_t level = 0; level < deepest; ++level) {
    rows_.clear();
    whose_.clear();
    for (std::size_t i = 0; i < tasks->size(); ++i) {
      const Task& task = (*tasks)[i];
      if (level >= task.depth || made[i] < level) continue;
      DraftState* state = task.sequence->lookahead->draft.get();
      const uint32_t start = state->num_known + static_cast<uint32_t>(state->guessed.size());
      const uint32_t count = static_cast<uint32_t>(task.sequence->tokens.size()) - start;
      rows_.push_back({task.sequence, state, start, count, level > 0});
      whose_.push_back(i);
    }
    LLMC_RETURN_IF_ERROR(RunRows(rows_, &next_));
    for (std::size_t k = 0; k < rows_.size(); ++k) {
      Sequence* s = (*tasks)[whose_[k]].sequence;
      if (next_[k] == kNotRun) continue;
      if (level == 0) {
        rows_[k].state->num_known = static_cast<uint32_t>(s->tokens.size());
      } else {
        rows_[k].state->guessed.push_back(s->tokens.back());
      }
      if (next_[k] == kNoToken) continue;
      s->tokens.push_back(next_[k]);
      ++made[whose_[k]];
    }
  }
  for (std::size_t i = 0; i < tasks->size(); ++i) {
    Task& task = (*tasks)[i];
    task.first = static_cast<uint32_t>(guesses->size());
    task.depth = made[i];
    guesses->insert(guesses->end(), task.sequence->tokens.end() - made[i], task.sequence->tokens.end());
  }
  return Status::Ok();
}

// The token reads and writes the dummy block only.
Status DraftModel::Warm(uint64_t* guess_ns) {
  *guess_ns = 0;
  StepBatch b;
  b.num_tokens = b.num_seqs = b.num_samples = b.block_table_stride = 1;
  b.input_ids = b.positions = b.slot_mapping = b.block_tables = b.sample_index = {0};
  b.context_lens = {1};
  b.query_start = {0, 1};
  if (!model_.adapters.empty()) b.adapter_slots = {kNoAdapter};
  for (std::size_t graph = 0; graph < model_.graphs.size(); ++graph) {
    b.graph = static_cast<uint32_t>(graph);
    device_->Reserve(b);
    device_->Visit(b.graph);
    const float* logits = nullptr;
    LLMC_RETURN_IF_ERROR(device_->Run(b, &logits));
  }
  StepLoad one;
  one.seqs = one.tokens = one.samples = one.blocks = one.all_blocks = 1;
  const int graph = ladder_.Choose(one, kAnyPhase);
  if (graph == kNoGraph) return Status::Ok();
  b.graph = static_cast<uint32_t>(graph);
  for (uint32_t i = 0; i < kTimedGuesses; ++i) {
    const uint64_t begin = MonotonicNs();
    const float* logits = nullptr;
    LLMC_RETURN_IF_ERROR(device_->Run(b, &logits));
    const uint64_t took = MonotonicNs() - begin;
    *guess_ns = i == 0 ? took : std::min(*guess_ns, took);
  }
  return Status::Ok();
}

// Runs rows in as few steps as graphs allow. next: the token behind each row, or kNoToken or kNotRun.
Status DraftModel::RunRows(const std::vector<Row>& rows, std::vector<int32_t>* next) {
  next->clear();
  for (std::size_t begin = 0; begin < rows.size();) {
    StepLoad load;
    int graph = kNoGraph;
    std::size_t end = begin;
    for (; end < rows.size(); ++end) {
      StepLoad more = load;
      AddRow(rows[end], &more);
      const int found = ladder_.Choose(more, kAnyPhase);
      if (found == kNoGraph) break;
      load = more;
      graph = found;
    }
    if (end == begin) {
      next->push_back(kNotRun);
      ++begin;
      continue;
    }
    LLMC_RETURN_IF_ERROR(RunGroup(&rows[begin], end - begin, load, graph, next));
    begin = end;
  }
  return Status::Ok();
}

Status DraftModel::RunGroup(const Row* rows, std::size_t count, const StepLoad& load, int graph,
                            std::vector<int32_t>* next) {
  StepBatch& b = batch_;
  b.graph = static_cast<uint32_t>(graph);
  b.num_tokens = load.tokens;
  b.num_seqs = load.seqs;
  b.num_samples = load.samples;
  b.block_table_stride = load.blocks;
  for (std::vector<int32_t>* of : {&b.input_ids, &b.positions, &b.slot_mapping, &b.context_lens, &b.sample_index}) {
    of->clear();
  }
  b.query_start.assign(1, 0);
  b.block_tables.assign(std::size_t{b.num_seqs} * b.block_table_stride, 0);
  int32_t* table = b.block_tables.data();
  for (const Row* row = rows; row != rows + count; ++row) {
    const uint32_t origin = row->state->origin, end = row->start + row->count - origin;
    for (uint32_t p = row->start - origin; p < end; ++p) {
      b.input_ids.push_back(row->sequence->tokens[origin + p]);
      b.positions.push_back(static_cast<int32_t>(p));
      b.slot_mapping.push_back(
          static_cast<int32_t>(row->state->blocks[p / block_size_] * block_size_ + p % block_size_));
    }
    std::copy_n(row->state->blocks.begin(), BlocksFor(end), table);
    table += b.block_table_stride;
    b.context_lens.push_back(static_cast<int32_t>(end));
    b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
    b.sample_index.push_back(static_cast<int32_t>(b.input_ids.size()) - 1);
  }
  draws_.clear();
  params_.resize(std::max(params_.size(), count));
  for (std::size_t i = 0; i < count; ++i) {
    const Sequence& s = *rows[i].sequence;
    SampleTask draw;
    draw.row = static_cast<uint32_t>(i);
    draw.params = &s.request->params;
    if (draw.params->num_logprobs >= 0) {  // the draft's logprobs are not reported
      params_[i] = s.request->params;
      params_[i].num_logprobs = -1;
      draw.params = &params_[i];
    }
    // Draws as the model does, with the same random number: its token is then likelier to be the same.
    draw.context = {s.tokens.data(), static_cast<uint32_t>(s.tokens.size()), s.num_prompt,
                    s.request->first_output + s.output_index};
    draws_.push_back(draw);
  }
  // After Enqueue nothing may fail before the step was waited for.
  outcomes_.resize(count);
  LLMC_RETURN_IF_ERROR(device_->BeforeStep());
  if (model_.takes_states) GiveStates(rows, count);
  Fence fence = 0;
  LLMC_RETURN_IF_ERROR(device_->Enqueue(b, &fence));
  LLMC_RETURN_IF_ERROR(Draw(fence, count));
  if (model_.takes_states) LLMC_RETURN_IF_ERROR(TakeStates(rows, count, b.num_tokens));
  for (std::size_t i = 0; i < count; ++i) {
    next->push_back(outcomes_[i].status.ok() ? outcomes_[i].result.token : kNoToken);
  }
  return Status::Ok();
}

// Gives each token the hidden state of the one before it.
void DraftModel::GiveStates(const Row* rows, std::size_t count) {
  float* out = device_->TakenStates();
  for (const Row* row = rows; row != rows + count; ++row) {
    for (uint32_t p = row->start; p < row->start + row->count; ++p, out += states_width()) {
      const float* from = row->guess ? row->state->last.data() : row->sequence->lookahead->states.row(p - 1);
      std::copy_n(from, states_width(), out);
    }
  }
}

// Keeps the hidden state of each row's last token.
Status DraftModel::TakeStates(const Row* rows, std::size_t count, uint32_t num_tokens) {
  const float* left = nullptr;
  LLMC_RETURN_IF_ERROR(device_->ReadStates(num_tokens, &left));
  for (const Row* row = rows; row != rows + count; ++row) {
    left += std::size_t{row->count} * states_width();
    row->state->last.assign(left - states_width(), left);
  }
  return Status::Ok();
}

Status DraftModel::Draw(Fence fence, std::size_t count) {
  if (device_->samples()) return device_->Sample(fence, draws_, &outcomes_);
  const float* logits = nullptr;
  LLMC_RETURN_IF_ERROR(device_->Wait(fence, &logits));
  for (std::size_t i = 0; i < count; ++i) outcomes_[i] = sampler_.Do(draws_[i], logits);
  return Status::Ok();
}

}  // namespace llmc
