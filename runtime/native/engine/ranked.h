// State of a request that returns its best continuations after all have ended.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/beam_search.h"
#include "engine/transcript.h"

namespace llmc {

struct Sequence;

// Beams; each is a sequence that shares KV blocks with others where their texts agree.
struct BeamGroup {
  BeamSearch search;
  std::vector<Sequence*> live;  // the sequence of each beam

  uint32_t index(const Sequence& s) const {
    uint32_t i = 0;
    while (i < live.size() && live[i] != &s) ++i;
    return i;
  }
  // Whether the beam's likeliest tokens are known, so that it waits for the other beams.
  bool waits(const Sequence& s) const {
    const uint32_t beam = index(s);
    return beam < live.size() && search.taken(beam);
  }
};

// Independent continuations.
struct BestOf {
  std::vector<Transcript> drawn;
};

}  // namespace llmc
