// Token masks of one continuation of a guided request, passed from the host to the step that samples with them. There
// is one for its next token, and one after each guess that the host looked ahead along.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

// kWanted → kReady by the host, → kTaken by a step, → kWanted or kDone when the step is published. Engine::mutex_
// guards it, except words and guesses of a taken mask, which belong to the stepping thread.
struct TokenMask {
  enum class State { kWanted, kReady, kTaken, kDone };
  State state = State::kWanted;
  std::vector<uint32_t> words;  // [guesses + 1][num_words], bit t % 32 of word t / 32: token t is allowed
  uint32_t num_words = 0;
  std::vector<int32_t> guesses;  // guesses from the host
  std::vector<int32_t> offered;  // guesses that the host may look ahead along
  // When a wanted mask was asked for, and the running mean of how much later masks came; 0: unknown.
  uint64_t asked_ns = 0, late_ns = 0;
};

}  // namespace llmc
