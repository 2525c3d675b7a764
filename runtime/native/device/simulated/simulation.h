// Runs a trace of requests through an engine on a simulated device, in virtual time.
#pragma once
#include <cstdint>

#include "device/simulated/simulated_device.h"
#include "engine/engine.h"

namespace llmc {

// Submits every request at its arrival, steps, and stores the times of its first and last token. Prompts are made up:
// equal prefix ids give equal tokens, and nothing else of two prompts is equal. A last time of 0 means that the request
// was refused or failed, or that trace.progress stopped the run before. The trace must be valid.
Status Simulate(const llmc_sim_trace& trace, Engine* engine, SimulatedDevice* device, uint64_t* first_token_ns,
                uint64_t* last_token_ns);

}  // namespace llmc
