// What an event says of a continuation.
#pragma once
#include <cstdint>

#include "engine/scheduler.h"
#include "llmc/llmc.h"
#include "sampling/sampler.h"

namespace llmc {

// kind: LLMC_EVENT_; output_index is not the sequence's before a prompt is done, when one stands for all.
llmc_event MakeEvent(const Sequence& sequence, uint32_t output_index, uint32_t kind);

// The token that was drawn, and its logprobs.
void SetSample(const SampleResult& sample, llmc_event* event);

}  // namespace llmc
