// RankGreeting: what ranks that mpirun started tell each other before anything else, so that those that do not belong
// together end with a sentence.
#pragma once
#include <cstdint>
#include <vector>

#include "core/status.h"

namespace llmc {

// Plain bytes. Another llmc reads them, so the layout stays as it is.
struct RankGreeting {
  uint32_t protocol;  // of the messages between ranks
  uint32_t num_ranks;  // of the artifact; 0: any
  char version[56];  // of llmc
};

RankGreeting GreetingOf(uint32_t num_ranks);

// The same on all ranks, so that none waits for another one. all: by rank.
Status CheckGreetings(const std::vector<RankGreeting>& all);

}  // namespace llmc
