// A trace of requests through an engine on a simulated device, in virtual time.
#pragma once
#include <cstdint>

#include "device/simulated/simulated_device.h"
#include "engine/engine.h"

namespace llmc {

// Submits every request at its arrival, steps, and notes when its first and its last token came. The prompts are made
// up: equal prefix ids give equal tokens, and nothing else of two prompts is equal. A request whose last time stays 0
// was refused or failed, or not reached when trace.progress stopped the run. The trace must be sound.
Status Simulate(const llmc_sim_trace& trace, Engine* engine, SimulatedDevice* device, uint64_t* first_token_ns,
                uint64_t* last_token_ns);

}  // namespace llmc
