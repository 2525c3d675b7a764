// The kinds of devices: each registers once, by a name that artifacts say (FORMAT.md).
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
  uint32_t num_blocks = 0;  // of the KV pool, the dummy block included
  // Steps will be timed one by one: each runs on all that the device has, whatever other programs do.
  bool timed = false;
  // Another one of the same kind, with which it takes turns: it may use the threads of that one. NULL: none.
  const Device* beside = nullptr;
  // How this rank works with the others, of an artifact for several. NULL: it is alone.
  std::shared_ptr<Collective> collective = nullptr;
};

// A device as a caller has opened it. Immutable; any thread.
class OpenDevice {
 public:
  virtual ~OpenDevice() = default;
  // Loads an artifact's code and weights: LLMC_ERR_UNSUPPORTED_TARGET for those of other devices.
  virtual Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& options,
                      std::unique_ptr<Device>* out) const = 0;
  // What it is and can do, for people and tools: name and value.
  virtual std::vector<std::pair<std::string, std::string>> Facts() const = 0;
};

struct DeviceKind {
  const char* name;
  const char* summary;  // one line
  Status (*open)(const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);
};

// All kinds, in the order in which they registered.
std::vector<const DeviceKind*> DeviceKinds();
// `kind` must outlive the process's use of it; one of the same name is replaced. Any thread.
void RegisterDeviceKind(const DeviceKind* kind);
Status OpenDeviceOf(const std::string& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);

}  // namespace llmc
