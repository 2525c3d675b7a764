// The kinds of devices. Each registers once under the name that artifacts give (FORMAT.md).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/status.h"
#include "device/device.h"
#include "device/options.h"

namespace llmc {

struct LoadOptions {
  uint32_t num_blocks = 0;  // of the KV pool, with the dummy block
  uint32_t num_states = 0;  // slots of states, with the dummy slot; 0: the model is not recurrent
  // Steps will be timed one by one: each runs on all resources of the device, even if other programs are busy.
  bool timed = false;
  // A device of the same kind with which it takes turns, and whose threads it may use. NULL: none.
  const Device* beside = nullptr;
  // Communication with the other ranks of an artifact for several. NULL: there are none.
  std::shared_ptr<Collective> collective = nullptr;
  // Of an artifact with stages; the same on all ranks. See Device::steps_in_flight.
  uint32_t steps_in_flight = 1;
};

// A device that a caller has opened. Immutable; any thread may use it.
class OpenDevice {
 public:
  virtual ~OpenDevice() = default;
  // Loads an artifact's code and weights. Returns LLMC_ERR_UNSUPPORTED_TARGET for artifacts of other devices.
  virtual Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& options,
                      std::unique_ptr<Device>* out) const = 0;
  // Properties as (name, value), for people and tools.
  virtual std::vector<std::pair<std::string, std::string>> Facts() const = 0;
};

struct DeviceKind {
  const char* name;
  const char* summary;  // one line
  Status (*open)(const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);
};

// All kinds, in the order in which they registered.
std::vector<const DeviceKind*> DeviceKinds();
// Adds a kind, or replaces the one of the same name. `kind` must stay valid as long as it is used. Any thread may call
// it.
void RegisterDeviceKind(const DeviceKind* kind);
Status OpenDeviceOf(const std::string& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);

}  // namespace llmc
