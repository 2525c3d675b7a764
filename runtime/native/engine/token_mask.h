// The token mask of one continuation of a guided request, handed from the host to the step that samples with it.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

// kWanted → kReady by the host, → kTaken by a step, → kWanted or kDone when the step is published. Engine::mutex_ guards
// it, but for the words of a taken mask: those belong to the stepping thread.
struct TokenMask {
  enum class State { kWanted, kReady, kTaken, kDone };
  State state = State::kWanted;
  std::vector<uint32_t> words;  // bit t % 32 of word t / 32: token t is allowed
};

}  // namespace llmc
