// Builds the events of a continuation.
#pragma once
#include <cstdint>

#include "engine/scheduler.h"
#include "llmc/llmc.h"
#include "sampling/sampler.h"

namespace llmc {

// kind: LLMC_EVENT_*. Before a prompt is done one sequence stands for all continuations, so output_index is separate.
llmc_event MakeEvent(const Sequence& sequence, uint32_t output_index, uint32_t kind);

// Sets the drawn token and its logprobs.
void SetSample(const SampleResult& sample, llmc_event* event);

}  // namespace llmc
