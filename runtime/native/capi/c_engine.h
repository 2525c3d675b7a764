// The type behind llmc_engine*, and its construction from a caller's options.
#pragma once
#include <functional>
#include <memory>

#include "core/c_struct.h"
#include "core/made_here.h"
#include "device/pool_kind.h"
#include "device/simulated/simulated_device.h"
#include "engine/engine.h"

struct llmc_engine {
  std::unique_ptr<llmc::Engine> engine;
  llmc::SimulatedDevice* simulated = nullptr;  // the engine's device if it is simulated
  llmc::MadeHere made;
};

namespace llmc {

// Whether a caller may use the engine: it is none, or it is that of another process.
inline Status CheckEngine(const llmc_engine* engine) {
  return engine == nullptr ? NullArgument("engine") : engine->made.Check("engine");
}

// Makes a device with these pools, the dummies included.
using MakeDevice = std::function<Status(const llmc_engine_options& options, const PoolCounts& counts,
                                        std::unique_ptr<Device>* device)>;

// Makes the device of options.draft, which runs in turn with the engine's device.
using MakeDraft = std::function<Status(const llmc_engine_options& options, const Device& beside,
                                       const PoolCounts& counts, std::unique_ptr<Device>* device)>;

// options NULL: the defaults. make_draft empty: a draft is refused.
Status MakeEngine(const ModelShape& model, const llmc_engine_options* options, const MakeDevice& make,
                  std::unique_ptr<llmc_engine>* out, const MakeDraft& make_draft = {});

}  // namespace llmc
