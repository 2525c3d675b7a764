// A request, from submission until its last event is published.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "device/batch.h"
#include "engine/placed_rows.h"
#include "engine/ranked.h"
#include "engine/scheduler.h"
#include "engine/token_mask.h"
#include "sampling/sampler.h"

namespace llmc {

struct Request {
  uint64_t id = 0;
  SamplingParams params;
  uint32_t max_length = 0;  // prompt and output
  bool forked = false;  // the prompt is done and all n sequences exist
  bool ended = false;
  bool guided = false;
  bool asked = false;  // its first masks were requested but it has not started; counted in Engine::num_asked_
  int32_t num_prompt_logprobs = -1;
  float* vector = nullptr;  // the caller's buffer, for a model that gives vectors
  PlacedRows placed;
  uint64_t adapter = 0;  // 0: none
  int32_t adapter_slot = kNoAdapter;
  uint64_t deadline_ns = 0;  // 0: none
  uint64_t arrival_ns = 0, first_scheduled_ns = 0, first_token_ns = 0;
  uint32_t num_unfinished = 0;
  uint32_t first_output = 0;  // index of its first continuation, which determines the random numbers
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<TokenMask> masks;  // [n] when guided
  uint32_t num_told = 1;  // continuations returned to the caller
  std::unique_ptr<BeamGroup> beams;
  std::unique_ptr<BestOf> best_of;

  // Whether events of continuations wait until all have ended.
  bool ranks() const { return beams != nullptr || best_of != nullptr; }
};

}  // namespace llmc
