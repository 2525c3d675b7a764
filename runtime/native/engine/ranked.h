// What a request needs that tells the best of its continuations when all have ended.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/beam_search.h"
#include "engine/transcript.h"

namespace llmc {

struct Sequence;

// Beams, each a sequence that shares the KV blocks of what it has in common with others.
struct BeamGroup {
  BeamSearch search;
  std::vector<Sequence*> live;  // of each beam of the search

  uint32_t index(const Sequence& s) const {
    uint32_t i = 0;
    while (i < live.size() && live[i] != &s) ++i;
    return i;
  }
  // A beam whose likeliest tokens are known waits for those of the others.
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
