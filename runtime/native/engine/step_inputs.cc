// Engine, continued: input arrays and sampling tasks of a planned step.
#include <algorithm>

#include "engine/engine.h"

namespace llmc {

// Packs the plan into the device's input arrays. A token that the step before draws is left open.
void Engine::Prepare(EngineStep* step) const {
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  const StepPlan& plan = step->plan;
  StepBatch& b = step->batch;
  b.graph = plan.graph;
  b.num_tokens = plan.load.tokens;
  b.num_seqs = plan.load.seqs;
  b.num_samples = plan.load.samples;
  b.block_table_stride = plan.load.blocks;
  step->drawn.clear();
  step->placed.clear();
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.context_lens.clear();
  b.query_start.assign(1, 0);
  b.sample_index.clear();
  b.adapter_slots.clear();
  b.state_slots.clear();
  b.rope_positions.clear();
  b.block_tables.assign(static_cast<size_t>(b.num_seqs) * b.block_table_stride, 0);
  int32_t* table = b.block_tables.data();
  const bool on_axes =
      model_.rope_axes > 0 && std::any_of(plan.items.begin(), plan.items.end(),
                                          [](const StepItem& item) { return item.sequence->placed != nullptr; });
  for (const StepItem& item : plan.items) {
    const Sequence& s = *item.sequence;
    const uint32_t end = item.start + item.count;
    for (uint32_t p = item.start; p < end; ++p) {
      const bool open = p >= s.tokens.size();
      if (open) step->drawn.push_back({static_cast<uint32_t>(b.input_ids.size()), s.task});
      const float* placed = s.placed == nullptr ? nullptr : s.placed->row(p);
      if (placed != nullptr) step->placed.push_back({static_cast<uint32_t>(b.input_ids.size()), placed});
      b.input_ids.push_back(placed != nullptr ? kPlacedRow : open ? 0 : s.tokens[p]);
      b.positions.push_back(static_cast<int32_t>(p));
      if (on_axes && s.placed != nullptr) {
        s.placed->AddRopePositions(p, &b.rope_positions);
      } else if (on_axes) {
        b.rope_positions.insert(b.rope_positions.end(), kRopeAxes, static_cast<int32_t>(p));
      }
      b.slot_mapping.push_back(static_cast<int32_t>(s.blocks[p / block_size] * block_size + p % block_size));
    }
    std::copy_n(s.blocks.begin(), (end + block_size - 1) / block_size, table);
    table += b.block_table_stride;
    if (!model_.adapters.empty()) b.adapter_slots.push_back(s.request->adapter_slot);
    if (model_.recurrent()) {
      for (const uint32_t number : {s.state_slot, item.keep_tokens, item.keep_slot}) {
        b.state_slots.push_back(static_cast<int32_t>(number));
      }
    }
    b.context_lens.push_back(static_cast<int32_t>(end));
    b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
    const int32_t row = static_cast<int32_t>(b.input_ids.size()) - static_cast<int32_t>(end);  // row of position 0
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      b.sample_index.push_back(row + static_cast<int32_t>(item.first_score + i));
    }
    if (!item.sample) continue;
    for (uint32_t p = end - 1 - item.num_guesses; p < end; ++p) {
      b.sample_index.push_back(row + static_cast<int32_t>(p));
    }
  }
}

// Gives the device the rows that take the place of tokens, and its step.
Status Engine::EnqueueRows(const EngineStep& step, Fence* fence) {
  if (!step.placed.empty()) {
    float* rows = device_->TakenStates();
    const std::size_t width = static_cast<uint32_t>(model_.states_width);
    for (const EngineStep::Placed& one : step.placed) std::copy_n(one.values, width, rows + one.row * width);
  }
  return device_->Enqueue(step.batch, fence);
}

// Lists what is drawn, in the order of items: first logprobs of a prompt's tokens, then a token. A prompt with n > 1
// that is done gets n tokens.
void Engine::ListTasks(EngineStep* step) {
  std::vector<SampleTask>& tasks = step->tasks;
  std::vector<int32_t>& guessed = step->guessed;
  tasks.clear();
  guessed.clear();
  uint32_t row = 0;
  for (const StepItem& item : step->plan.items) {
    Sequence& s = *item.sequence;
    const Request& r = *s.request;
    const bool unwanted = s.state == Sequence::State::kDone;  // it ended when this step was on its way
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      SampleTask score;
      score.unwanted = unwanted;
      score.row = row++;
      score.position = item.first_score + i + 1;
      score.token = s.tokens[score.position];
      score.num_top = static_cast<uint32_t>(r.num_prompt_logprobs);
      tasks.push_back(score);
      guessed.push_back(EngineStep::kNoGuess);
    }
    if (!item.sample) continue;
    s.task = static_cast<uint32_t>(tasks.size());
    // A row that is thrown away is drawn behind the tokens that its sequence ended with.
    const uint32_t known = std::min(item.start + item.count - item.num_guesses, static_cast<uint32_t>(s.tokens.size()));
    if (r.beams != nullptr) {
      SampleTask best;
      best.unwanted = unwanted;
      best.row = row++;
      best.position = known;
      best.num_best = r.beams->search.num_best();
      tasks.push_back(best);
      guessed.push_back(EngineStep::kNoGuess);
      continue;
    }
    const uint32_t first = r.forked ? s.output_index : 0, end = r.forked ? first + 1 : r.params.n;
    for (uint32_t output_index = first; output_index < end; ++output_index) {
      SampleTask draw;
      draw.unwanted = unwanted;
      draw.row = row;
      draw.params = &r.params;
      draw.context = {s.tokens.data(), known, s.num_prompt, r.first_output + output_index};
      if (r.guided) {
        const TokenMask& mask = r.masks[output_index];
        draw.context.mask = mask.words.data();
        draw.context.num_mask_words = mask.num_words;
      }
      tasks.push_back(draw);
      guessed.push_back(EngineStep::kNoGuess);
    }
    ++row;
    if (item.num_guesses == 0) continue;
    // Tokens behind guesses are drawn as if these were right: the step that would draw them has the same text.
    for (uint32_t i = 0; i < item.num_guesses; ++i, ++row) {
      SampleTask draw = tasks.back();
      draw.row = row;
      draw.context.num_tokens = known + i + 1;
      if (r.guided) draw.context.mask += draw.context.num_mask_words;
      tasks.push_back(draw);
      guessed.push_back(s.tokens[known + i]);
    }
  }
}

}  // namespace llmc
