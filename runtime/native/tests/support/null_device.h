// A device without arithmetic. Each slot of its KV pool holds a hash of everything that the token at that position
// depends on, read through block tables. A wrong slot, block, position, copy or reuse changes every later logit.
//
// Of a recurrent model, a slot of states holds how many tokens were folded, and their fold. A step fails unless it finds
// the state of exactly the tokens before its first one.
//
// A row in place of a token counts as a token with the number SeenRow of its floats, which must be equal. Where each
// token has a row, the numbers are added.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"

namespace llmc_test {

inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline uint64_t TokenHash(uint64_t before, int32_t token, uint32_t position) {
  return Mix(before ^ Mix((static_cast<uint64_t>(position) << 32) | static_cast<uint32_t>(token)));
}
inline uint64_t Fold(uint64_t fold, uint64_t slot) { return Mix(fold * 31 + slot); }

// A token with other rotary positions than its position counts as another one.
inline int32_t SeenAt(int32_t token, int32_t position, const int32_t* axes) {
  int32_t number = 0;
  for (uint32_t axis = 0; axis < llmc::kRopeAxes; ++axis) number = number * 31 + axes[axis] - position;
  return token + 10000 * number;
}

constexpr int32_t kFirstRow = 1000;
inline int32_t SeenRow(float value) { return kFirstRow + static_cast<int32_t>(value); }

inline void LogitsOf(uint64_t fold, int32_t vocab, float* out) {
  for (int32_t v = 0; v < vocab; ++v) {
    out[v] = static_cast<float>(Mix(fold + static_cast<uint64_t>(v)) >> 40) / 16777216.0f * 12.0f - 6.0f;
  }
}

class NullDevice : public llmc::Device {
 public:
  static inline uint32_t workers = 1;  // applies to engines made later
  // Of a recurrent model, slots of states besides the dummy slot; 0: a few more than sequences.
  static inline uint32_t slots = 0;  // applies to engines made later
  NullDevice(llmc::ModelShape shape, uint32_t num_blocks)
      : shape_(std::move(shape)),
        num_blocks_(num_blocks),
        pool_(static_cast<size_t>(num_blocks) * shape_.block_size, 0xdead) {
    const uint32_t seqs = static_cast<uint32_t>(shape_.max_num_seqs);
    if (shape_.recurrent()) states_.assign(1 + (slots > 0 ? slots : 3 * seqs), kNoState);
    uint32_t most = 0;
    for (const llmc::GraphShape& graph : shape_.graphs) most = std::max(most, graph.max_tokens);
    if (shape_.takes_states) rows_.assign(size_t{most} * static_cast<uint32_t>(shape_.states_width), 0.0f / zero_);
  }
  const llmc::ModelShape& model() const override { return shape_; }
  uint32_t num_blocks() const override { return num_blocks_; }
  uint32_t num_states() const override { return static_cast<uint32_t>(states_.size()); }
  uint32_t num_host_threads() const override { return workers; }

  // Starts with the last worker: results must depend neither on the order nor on the thread.
  void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) override {
    if (num_workers < 2) return Device::ForEach(count, num_workers, job, context);
    std::vector<std::thread> threads;
    for (uint32_t worker = num_workers; worker-- > 0;) {
      threads.emplace_back([=] {
        for (uint32_t i = worker; i < count; i += num_workers) job(context, i, worker);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // A device that overlaps computes at the fence, from a batch of its own.
  static inline bool late = false;  // applies to engines made later
  // One that chains refuses every third step, and loses some, as if the host had to draw.
  static inline bool chains = false;  // applies to engines made later that are late and draw
  // More than one: it takes steps without a sequence in common, which a pipeline computes in order.
  static inline uint32_t in_flight = 1;  // applies to engines made later
  uint32_t steps_in_flight() const override { return in_flight_; }
  llmc::Overlap overlap() const override {
    if (in_flight_ > 1) return llmc::Overlap::kDisjoint;
    if (!late_) return llmc::Overlap::kNone;
    return chains_ && draws_ ? llmc::Overlap::kChained : llmc::Overlap::kPrepared;
  }
  llmc::Status Chain(const std::vector<llmc::SampleTask>& tasks, const llmc::StepBatch& next,
                     const std::vector<llmc::DrawnRow>& drawn, llmc::Fence* fence, bool* chained) override {
    if (enqueued_ == 0 || next_fence_ != 0) return Bad("a step is chained to nothing, or to a chained one");
    for (const llmc::DrawnRow& one : drawn) {
      if (one.task >= tasks.size() || one.row >= next.num_tokens) return Bad("a row that nobody draws");
    }
    *chained = never_refuses || enqueued_ % 3 != 0;
    if (!*chained) return llmc::Status::Ok();
    next_ = next;
    drawn_ = drawn;
    next_fence_ = *fence = ++last_fence_;
    ++chained_steps;
    return llmc::Status::Ok();
  }
  llmc::Status SampleChained(llmc::Fence fence, const std::vector<llmc::SampleTask>& tasks,
                             std::vector<llmc::SampleOutcome>* outcomes, bool* lost) override {
    if (fence != enqueued_ || next_fence_ == 0) return Bad("nobody chained this step");
    LLMC_RETURN_IF_ERROR(Sample(fence, tasks, outcomes));
    *lost = loses > 0 && fence % loses == 0;
    for (llmc::SampleOutcome& outcome : *outcomes) outcome.result.token = *lost ? 0 : outcome.result.token;
    batch_ = next_;
    for (const llmc::DrawnRow& one : drawn_) {
      const llmc::SampleOutcome& outcome = (*outcomes)[one.task];
      batch_.input_ids[one.row] = outcome.status.ok() ? outcome.result.token : 0;
    }
    LLMC_RETURN_IF_ERROR(SeeRows(&batch_));
    enqueued_ = std::exchange(next_fence_, 0);
    lost_steps += *lost;
    return llmc::Status::Ok();
  }
  float* TakenStates() override { return rows_.empty() ? nullptr : rows_.data(); }
  llmc::Status Enqueue(const llmc::StepBatch& given, llmc::Fence* fence) override {
    llmc::StepBatch b = given;
    LLMC_RETURN_IF_ERROR(SeeRows(&b));
    if (in_flight_ > 1) return Queue(b, fence);
    if (enqueued_ != 0) return Bad("a step is on its way already");
    batch_ = b;
    if (!late_) LLMC_RETURN_IF_ERROR(Compute(batch_));
    enqueued_ = *fence = ++last_fence_;
    return llmc::Status::Ok();
  }
  llmc::Status Wait(llmc::Fence fence, const float** logits) override {
    if (in_flight_ > 1) return WaitQueued(fence, logits);
    // A chained step whose tokens nobody asked for runs with others.
    if (fence != 0 && fence == next_fence_) {
      batch_ = next_;
      LLMC_RETURN_IF_ERROR(SeeRows(&batch_));
      enqueued_ = std::exchange(next_fence_, 0);
    }
    if (fence == 0 || fence != enqueued_) return Bad("nobody enqueued this step");
    enqueued_ = 0;
    *logits = nullptr;
    if (late_) LLMC_RETURN_IF_ERROR(Compute(batch_));
    *logits = logits_.data();
    return llmc::Status::Ok();
  }

  // With step_ns, time passes as steps run, not as it does for the machine.
  uint64_t step_ns = 0, row_ns = 0, clock_ns = 0;
  uint64_t ClockNs() const override { return step_ns == 0 ? Device::ClockNs() : clock_ns; }

  // A device that samples draws by itself, the last task first.
  static inline bool draws = false;  // applies to engines made later
  bool samples() const override { return draws_; }
  llmc::Status Sample(llmc::Fence fence, const std::vector<llmc::SampleTask>& tasks,
                      std::vector<llmc::SampleOutcome>* outcomes) override {
    if (!draws_ || outcomes->size() != tasks.size()) return Bad("nobody asked whether this device samples");
    const float* logits = nullptr;
    LLMC_RETURN_IF_ERROR(Wait(fence, &logits));
    llmc::Sampler sampler(shape_.vocab_size, shape_.eos_token_ids);
    for (size_t i = tasks.size(); i-- > 0;) {
      unwanted_tasks += tasks[i].unwanted;
      if (!tasks[i].unwanted) (*outcomes)[i] = sampler.Do(tasks[i], logits);
    }
    ++draw_calls;
    return llmc::Status::Ok();
  }

  llmc::Status Compute(const llmc::StepBatch& b) {
    ++runs;
    clock_ns += step_ns + b.num_tokens * row_ns;
    if (on_run) on_run();
    if (Fails()) {
      // Some rows may have been written.
      for (const int32_t slot : b.slot_mapping) {
        if (slot < shape_.block_size || slot >= static_cast<int32_t>(pool_.size())) continue;
        pool_[slot] = 0xbad;
      }
      for (const int32_t slot : StatesOf(b)) states_[static_cast<uint32_t>(slot)] = kNoState;
      return Failed();
    }
    if (b.graph >= shape_.graphs.size()) return Bad("graph");
    const llmc::GraphShape& g = shape_.graphs[b.graph];
    if (b.num_tokens == 0 || b.num_tokens > g.max_tokens || b.num_seqs > g.max_seqs || b.num_samples > g.max_samples ||
        b.block_table_stride > g.max_blocks_per_seq) {
      return Bad("the batch does not fit graph " + std::to_string(b.graph));
    }
    if (b.input_ids.size() != b.num_tokens || b.positions.size() != b.num_tokens ||
        b.slot_mapping.size() != b.num_tokens || b.context_lens.size() != b.num_seqs ||
        b.query_start.size() != b.num_seqs + 1 || b.sample_index.size() != b.num_samples ||
        b.block_tables.size() != static_cast<size_t>(b.num_seqs) * b.block_table_stride ||
        b.query_start.back() != static_cast<int32_t>(b.num_tokens) ||
        b.state_slots.size() != (shape_.recurrent() ? size_t{llmc::kStateFields} * b.num_seqs : 0)) {
      return Bad("array sizes");
    }
    std::set<int32_t> state_slots;
    const int32_t bs = shape_.block_size;
    std::set<int32_t> written;
    std::vector<uint64_t> folds(b.num_tokens);
    for (uint32_t i = 0; i < b.num_seqs; ++i) {
      const int32_t* table = &b.block_tables[static_cast<size_t>(i) * b.block_table_stride];
      const int32_t begin = b.query_start[i], end = b.query_start[i + 1];
      if (end <= begin) return Bad("empty sequence");
      // Only scored prompts and guesses have several tokens per sequence in a decode graph.
      decode_chunks += g.phase == llmc::Phase::kDecode && end - begin != 1;
      if (b.positions[end - 1] + 1 != b.context_lens[i]) return Bad("context length");
      uint64_t fold = 0;
      const int32_t start = b.positions[begin];
      if (b.slot_mapping[begin] < bs) {
        ++dummy_seqs;  // warm-up: may write to the dummy block only
        for (int32_t t = begin; t < end; ++t) {
          if (b.slot_mapping[t] != b.positions[t] % bs) return Bad("slot outside the dummy block");
        }
        if (shape_.recurrent() && StateOf(b, i, 0) + StateOf(b, i, 1) != 0) return Bad("state outside the dummy slot");
        continue;
      }
      auto slot_of = [&](int32_t p) { return table[p / bs] * bs + p % bs; };
      for (int32_t p = 0; p < start; ++p) fold = Fold(fold, pool_[slot_of(p)]);
      const int32_t own = StateOf(b, i, 0), keep_tokens = StateOf(b, i, 1), keep_slot = StateOf(b, i, 2);
      for (const int32_t slot : {own, keep_tokens > 0 ? keep_slot : 0}) {
        if (!shape_.recurrent() || (slot == 0 && slot != own)) continue;
        if (slot < 1 || slot >= static_cast<int32_t>(states_.size())) return Bad("slot of states");
        if (!state_slots.insert(slot).second) return Bad("slot of states of two sequences");
      }
      if (shape_.recurrent() && start > 0) {
        const State& state = states_[static_cast<uint32_t>(own)];
        if (state.count != static_cast<uint64_t>(start) || state.fold != fold) {
          return Bad("the state of " + std::to_string(state.count) + " tokens before token " + std::to_string(start));
        }
        ++states_read;
      }
      for (int32_t t = begin; t < end; ++t) {
        const int32_t p = b.positions[t], slot = b.slot_mapping[t];
        if (p != start + t - begin) return Bad("positions");
        if (slot < bs || slot != slot_of(p) || slot >= static_cast<int32_t>(pool_.size())) return Bad("slot");
        if (!written.insert(slot).second) return Bad("slot written twice");
        pool_[slot] = TokenHash(fold, b.input_ids[t], static_cast<uint32_t>(p));
        fold = Fold(fold, pool_[slot]);
        folds[t] = fold;
        if (shape_.recurrent() && p + 1 == keep_tokens) {
          states_[static_cast<uint32_t>(keep_slot)] = {static_cast<uint64_t>(keep_tokens), fold};
          ++states_kept;
        }
      }
      if (shape_.recurrent()) {
        states_[static_cast<uint32_t>(own)] = {static_cast<uint64_t>(b.positions[end - 1]) + 1, fold};
      }
    }
    logits_.resize(static_cast<size_t>(b.num_samples) * shape_.vocab_size);
    for (uint32_t s = 0; s < b.num_samples; ++s) {
      const uint64_t fold = folds[b.sample_index[s]];
      LogitsOf(fold % 100 < wrong ? ~fold : fold, shape_.vocab_size,
               &logits_[static_cast<size_t>(s) * shape_.vocab_size]);
    }
    if (poison) std::fill(logits_.begin(), logits_.end(), 0.0f / zero_);
    last_graph = b.graph;
    last_seqs = b.num_seqs;
    last_tokens = b.num_tokens;
    max_tokens_seen = std::max(max_tokens_seen, b.num_tokens);
    return llmc::Status::Ok();
  }

  void Visit(uint32_t graph) override {
    last_graph = graph;
    ++walks;
  }

  llmc::Status CopyBlock(uint32_t from, uint32_t to) override {
    ComputeQueued();
    if (enqueued_ != 0) return Bad("copy behind a step that nobody waited for");
    if (from == 0 || to == 0 || from >= num_blocks_ || to >= num_blocks_ || from == to) return Bad("copy");
    if (Fails()) return ++failed_copies, Failed();
    std::copy_n(pool_.begin() + static_cast<size_t>(from) * shape_.block_size, shape_.block_size,
                pool_.begin() + static_cast<size_t>(to) * shape_.block_size);
    ++copies;
    return llmc::Status::Ok();
  }
  llmc::Status CopyState(uint32_t from, uint32_t to) override {
    return States(from, to, to, states_.size(), &failed_copies, [=] {
      states_[to] = states_[from];
      ++states_copied;
    });
  }

  // A place is reused only after its contents were read.
  llmc::Status OpenSwapSpace(uint32_t num_places, uint32_t num_state_places, uint64_t* ns,
                             uint64_t* state_ns) override {
    saved_.resize(static_cast<size_t>(num_places) * shape_.block_size);
    saved_states_.resize(num_state_places, kNoState);
    *ns = *state_ns = 1;
    return llmc::Status::Ok();
  }
  llmc::Status SaveBlock(uint32_t block, uint32_t place) override {
    return Swap(block, place, &failed_saves, [=](uint64_t* of_block, uint64_t* of_place) {
      std::copy_n(of_block, shape_.block_size, of_place);
      ++saves;
    });
  }
  llmc::Status LoadBlock(uint32_t place, uint32_t block) override {
    return Swap(block, place, &failed_loads, [=](uint64_t* of_block, uint64_t* of_place) {
      std::copy_n(of_place, shape_.block_size, of_block);
      std::fill_n(of_place, shape_.block_size, 0xdead);
      ++loads;
    });
  }

  llmc::Status ReadBlock(uint32_t block, unsigned char* out) override {
    return Whole(block, [=](uint64_t* of_block) { std::memcpy(out, of_block, BlockBytes()); });
  }
  llmc::Status WriteBlock(uint32_t block, const unsigned char* from) override {
    return Whole(block, [=](uint64_t* of_block) { std::memcpy(of_block, from, BlockBytes()); });
  }
  llmc::Status SaveState(uint32_t slot, uint32_t place) override {
    return States(slot, slot, place, saved_states_.size(), &failed_saves, [=] {
      saved_states_[place] = states_[slot];
      ++states_saved;
    });
  }
  llmc::Status LoadState(uint32_t place, uint32_t slot) override {
    return States(slot, slot, place, saved_states_.size(), &failed_loads, [=] {
      states_[slot] = std::exchange(saved_states_[place], kNoState);
      ++states_loaded;
    });
  }
  llmc::Status ReadState(uint32_t slot, unsigned char* out) override {
    uint64_t failures = 0;
    return States(slot, slot, slot, states_.size(), &failures,
                  [=] { std::memcpy(out, &states_[slot], sizeof(State)); });
  }
  llmc::Status WriteState(uint32_t slot, const unsigned char* from) override {
    uint64_t failures = 0;
    return States(slot, slot, slot, states_.size(), &failures,
                  [=] { std::memcpy(&states_[slot], from, sizeof(State)); });
  }
  // Tokens that were folded, and their fold.
  struct State {
    uint64_t count, fold;
  };
  size_t num_places() const { return saved_.size() / static_cast<size_t>(shape_.block_size); }
  size_t num_state_places() const { return saved_states_.size(); }
  size_t BlockBytes() const { return static_cast<size_t>(shape_.block_size) * sizeof(uint64_t); }

  int fail_after = 0;  // steps and copies until one fails
  llmc_status fail_code = LLMC_ERR_INTERNAL;
  bool poison = false;
  bool never_refuses = false;
  uint32_t loses = 0;  // of chained steps, each of which the host must draw; 0: none
  uint32_t wrong = 0;  // per cent of rows that get another text's logits
  std::function<void()> on_run;
  uint32_t last_graph = 0, last_seqs = 0, last_tokens = 0, max_tokens_seen = 0;
  uint64_t walks = 0, runs = 0, copies = 0, saves = 0, loads = 0, decode_chunks = 0, dummy_seqs = 0, draw_calls = 0,
           chained_steps = 0, lost_steps = 0, unwanted_tasks = 0, most_queued = 0, failed_copies = 0, failed_saves = 0,
           failed_loads = 0, rows_placed = 0, states_read = 0, states_kept = 0, states_copied = 0, states_saved = 0,
           states_loaded = 0;

 private:
  static constexpr State kNoState{UINT32_MAX, 0xdead};
  // A number of a sequence's record in state_slots; 0 where the model is not recurrent.
  static int32_t StateOf(const llmc::StepBatch& b, uint32_t sequence, uint32_t field) {
    return b.state_slots.empty() ? 0 : b.state_slots[size_t{llmc::kStateFields} * sequence + field];
  }
  // Slots of states that a step reads or writes.
  static std::set<int32_t> StatesOf(const llmc::StepBatch& b) {
    std::set<int32_t> slots;
    for (uint32_t i = 0; i < b.num_seqs; ++i) {
      slots.insert(StateOf(b, i, 0));
      if (StateOf(b, i, 1) > 0) slots.insert(StateOf(b, i, 2));
    }
    slots.erase(0);
    return slots;
  }
  struct Queued {
    llmc::Fence fence;
    llmc::StepBatch batch;
    bool computed = false;
    llmc::Status status{};
    std::vector<float> logits{};
  };
  // Blocks that a step writes to; with all: those that it reads, too.
  std::set<int32_t> BlocksOf(const llmc::StepBatch& b, bool all) const {
    std::set<int32_t> blocks;
    for (const int32_t slot : b.slot_mapping) blocks.insert(slot / shape_.block_size);
    if (all) blocks.insert(b.block_tables.begin(), b.block_tables.end());
    blocks.erase(0);
    return blocks;
  }
  // Takes the rows that were given for this step, and forgets them all.
  llmc::Status SeeRows(llmc::StepBatch* b) {
    const size_t width = static_cast<uint32_t>(shape_.states_width);
    const bool all = shape_.takes_states && !shape_.places_rows;
    for (size_t t = 0; t < b->input_ids.size(); ++t) {
      if (b->input_ids[t] != llmc::kPlacedRow && !all) continue;
      if ((t + 1) * width > rows_.size()) return Bad("a row in place of a token, for a model that takes none");
      const float* row = &rows_[t * width];
      if (!std::all_of(row, row + width, [row](float value) { return value == *row; })) return Bad("a row");
      b->input_ids[t] = SeenRow(*row) + (all ? b->input_ids[t] : 0);
      ++rows_placed;
    }
    if (!b->rope_positions.empty() && b->rope_positions.size() != b->positions.size() * llmc::kRopeAxes) {
      return Bad("rotary positions");
    }
    for (size_t t = 0; t < b->input_ids.size() && !b->rope_positions.empty(); ++t) {
      b->input_ids[t] = SeenAt(b->input_ids[t], b->positions[t], &b->rope_positions[t * llmc::kRopeAxes]);
    }
    std::fill(rows_.begin(), rows_.end(), 0.0f / zero_);
    return llmc::Status::Ok();
  }
  llmc::Status Queue(const llmc::StepBatch& b, llmc::Fence* fence) {
    if (queue_.size() == in_flight_) return Bad("too many steps are on their way");
    for (const Queued& other : queue_) {
      for (const auto& [writes, reads] : {std::pair(&b, &other.batch), std::pair(&other.batch, &b)}) {
        const std::set<int32_t> read = BlocksOf(*reads, true);
        for (const int32_t block : BlocksOf(*writes, false)) {
          if (read.count(block) != 0) return Bad("a block of two steps on their way");
        }
      }
      const std::set<int32_t> taken = StatesOf(other.batch);
      for (const int32_t slot : StatesOf(b)) {
        if (taken.count(slot) != 0) return Bad("a slot of states of two steps on their way");
      }
    }
    queue_.push_back({++last_fence_, b});
    *fence = last_fence_;
    most_queued = std::max<uint64_t>(most_queued, queue_.size());
    return llmc::Status::Ok();
  }
  void ComputeQueued(size_t count = SIZE_MAX) {
    for (size_t i = 0; i < std::min(count, queue_.size()); ++i) {
      Queued& one = queue_[i];
      if (std::exchange(one.computed, true)) continue;
      one.status = Compute(one.batch);
      one.logits = logits_;
    }
  }
  llmc::Status WaitQueued(llmc::Fence fence, const float** logits) {
    if (queue_.empty() || queue_.front().fence != fence) return Bad("this step is not the oldest one");
    ComputeQueued(1);
    const llmc::Status status = queue_.front().status;
    logits_ = std::move(queue_.front().logits);
    last_seqs = queue_.front().batch.num_seqs;
    queue_.pop_front();
    *logits = logits_.data();
    return status;
  }
  template <class Copy>
  llmc::Status Whole(uint32_t block, Copy copy) {
    ComputeQueued();
    if (enqueued_ != 0) return Bad("copy behind a step that nobody waited for");
    if (block == 0 || block >= num_blocks_ || shape_.kv_block_bytes != BlockBytes()) return Bad("block");
    copy(pool_.data() + static_cast<size_t>(block) * shape_.block_size);
    return llmc::Status::Ok();
  }
  // slot, other: of states. place: below most, of a slot or of the swap space.
  template <class Copy>
  llmc::Status States(uint32_t slot, uint32_t other, uint32_t place, size_t most, uint64_t* failures, Copy copy) {
    ComputeQueued();
    if (enqueued_ != 0) return Bad("copy behind a step that nobody waited for");
    if (slot == 0 || other == 0 || slot >= states_.size() || place >= most) return Bad("slot of states");
    if (shape_.state_bytes != sizeof(State)) return Bad("states");
    if (Fails()) return ++*failures, Failed();
    copy();
    return llmc::Status::Ok();
  }
  template <class Copy>
  llmc::Status Swap(uint32_t block, uint32_t place, uint64_t* failures, Copy copy) {
    const size_t size = static_cast<size_t>(shape_.block_size);
    ComputeQueued();
    if (enqueued_ != 0) return Bad("copy behind a step that nobody waited for");
    if (block == 0 || block >= num_blocks_ || (place + 1) * size > saved_.size()) return Bad("swap");
    if (Fails()) return ++*failures, Failed();
    copy(pool_.data() + block * size, saved_.data() + place * size);
    return llmc::Status::Ok();
  }
  bool Fails() { return fail_after > 0 && --fail_after == 0; }
  llmc::Status Failed() const { return llmc::Status::Error(fail_code, "the device was told to fail"); }
  static llmc::Status Bad(std::string what) { return llmc::Status::Error(LLMC_ERR_INTERNAL, std::move(what)); }
  llmc::ModelShape shape_;
  uint32_t num_blocks_;
  std::vector<uint64_t> pool_, saved_;
  std::vector<State> states_, saved_states_;
  std::vector<float> logits_, rows_;
  const bool late_ = late, draws_ = draws, chains_ = chains;
  const uint32_t in_flight_ = in_flight;
  std::deque<Queued> queue_;
  llmc::Fence enqueued_ = 0, last_fence_ = 0;
  llmc::StepBatch batch_, next_;  // next_: chained to batch_
  std::vector<llmc::DrawnRow> drawn_;
  llmc::Fence next_fence_ = 0;
  volatile float zero_ = 0;
};

}  // namespace llmc_test
