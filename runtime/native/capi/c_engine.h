// The type behind llmc_engine*, and its construction from a caller's options.
#pragma once
#include <functional>
#include <memory>

#include "device/simulated/simulated_device.h"
#include "engine/engine.h"

struct llmc_engine {
  std::unique_ptr<llmc::Engine> engine;
  llmc::SimulatedDevice* simulated = nullptr;  // the engine's device if it is simulated
};

namespace llmc {

// Makes a device whose KV pool has num_blocks blocks, the dummy block included.
using MakeDevice =
    std::function<Status(const llmc_engine_options& options, uint32_t num_blocks, std::unique_ptr<Device>* device)>;

// Makes the device of options.draft, which runs in turn with the engine's device.
using MakeDraft = std::function<Status(const llmc_engine_options& options, const Device& beside, uint32_t num_blocks,
                                       std::unique_ptr<Device>* device)>;

// options NULL: the defaults. make_draft empty: a draft is refused.
Status MakeEngine(const ModelShape& model, const llmc_engine_options* options, const MakeDevice& make,
                  std::unique_ptr<llmc_engine>* out, const MakeDraft& make_draft = {});

}  // namespace llmc
