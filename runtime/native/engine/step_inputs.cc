// Engine, continued: what a planned step asks of the device, its input arrays and its draws.
#include <algorithm>

#include "engine/engine.h"

namespace llmc {

// Packs the plan into the device's input arrays.
void Engine::Prepare() {
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  StepBatch& b = batch_;
  b.graph = plan_.graph;
  b.num_tokens = plan_.load.tokens;
  b.num_seqs = plan_.load.seqs;
  b.num_samples = plan_.load.samples;
  b.block_table_stride = plan_.load.blocks;
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.context_lens.clear();
  b.query_start.assign(1, 0);
  b.sample_index.clear();
  b.adapter_slots.clear();
  b.block_tables.assign(static_cast<size_t>(b.num_seqs) * b.block_table_stride, 0);
  int32_t* table = b.block_tables.data();
  for (const StepItem& item : plan_.items) {
    const Sequence& s = *item.sequence;
    const uint32_t end = item.start + item.count;
    for (uint32_t p = item.start; p < end; ++p) {
      b.input_ids.push_back(s.tokens[p]);
      b.positions.push_back(static_cast<int32_t>(p));
      b.slot_mapping.push_back(static_cast<int32_t>(s.blocks[p / block_size] * block_size + p % block_size));
    }
    std::copy_n(s.blocks.begin(), (end + block_size - 1) / block_size, table);
    table += b.block_table_stride;
    if (!model_.adapters.empty()) b.adapter_slots.push_back(s.request->adapter_slot);
    b.context_lens.push_back(static_cast<int32_t>(end));
    b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
    const int32_t row = static_cast<int32_t>(b.input_ids.size()) - static_cast<int32_t>(end);  // of position 0
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      b.sample_index.push_back(row + static_cast<int32_t>(item.first_score + i));
    }
    if (!item.sample) continue;
    for (uint32_t p = end - 1 - item.num_guesses; p < end; ++p) {
      b.sample_index.push_back(row + static_cast<int32_t>(p));
    }
  }
}

// What is drawn of the step's rows, in the order of its items: the logprobs of a prompt's tokens first, then a token, or
// n of them where a prompt with n > 1 is done.
void Engine::ListTasks() {
  tasks_.clear();
  guessed_.clear();
  uint32_t row = 0;
  for (const StepItem& item : plan_.items) {
    const Sequence& s = *item.sequence;
    const Request& r = *s.request;
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      SampleTask score;
      score.row = row++;
      score.position = item.first_score + i + 1;
      score.token = s.tokens[score.position];
      score.num_top = static_cast<uint32_t>(r.num_prompt_logprobs);
      tasks_.push_back(score);
      guessed_.push_back(kNoGuess);
    }
    if (!item.sample) continue;
    if (r.beams != nullptr) {
      SampleTask best;
      best.row = row++;
      best.position = static_cast<uint32_t>(s.tokens.size());
      best.num_best = r.beams->search.num_best();
      tasks_.push_back(best);
      guessed_.push_back(kNoGuess);
      continue;
    }
    const uint32_t first = r.forked ? s.output_index : 0, end = r.forked ? first + 1 : r.params.n;
    for (uint32_t output_index = first; output_index < end; ++output_index) {
      SampleTask draw;
      draw.row = row;
      draw.params = &r.params;
      draw.context = {s.tokens.data(), static_cast<uint32_t>(s.tokens.size()), s.num_prompt,
                      r.first_output + output_index};
      if (r.guided) {
        const TokenMask& mask = r.masks[output_index];
        draw.context.mask = mask.words.data();
        draw.context.num_mask_words = mask.num_words;
      }
      tasks_.push_back(draw);
      guessed_.push_back(kNoGuess);
    }
    ++row;
    if (item.num_guesses == 0) continue;
    // What comes behind the guesses is drawn as if they were right: the step that would draw it has the same text.
    const uint32_t known = item.start + item.count - item.num_guesses;
    tasks_.back().context.num_tokens = known;
    for (uint32_t i = 0; i < item.num_guesses; ++i, ++row) {
      SampleTask draw = tasks_.back();
      draw.row = row;
      draw.context.num_tokens = known + i + 1;
      if (r.guided) draw.context.mask += draw.context.num_mask_words;
      tasks_.push_back(draw);
      guessed_.push_back(s.tokens[known + i]);
    }
  }
  outcomes_.resize(tasks_.size());
}

}  // namespace llmc
