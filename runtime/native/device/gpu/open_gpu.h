// OpenGpu: an opened machine of a kind of GPU devices, which loads artifacts.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/registry.h"

namespace llmc {

// Loaded: the device of an artifact, with `Create`. Options: what the caller chose for every artifact.
template <class Machine, class Loaded, class Options>
class OpenGpu final : public OpenDevice {
 public:
  OpenGpu(std::shared_ptr<const Machine> machine, Options options)
      : machine_(std::move(machine)), options_(std::move(options)) {}

  Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& load,
              std::unique_ptr<Device>* out) const override {
    std::unique_ptr<Loaded> device;
    LLMC_RETURN_IF_ERROR(Loaded::Create(machine_, std::move(artifact), load, options_, &device));
    *out = std::move(device);
    return Status::Ok();
  }

  std::vector<std::pair<std::string, std::string>> Facts() const override { return machine_->Facts(); }

 private:
  std::shared_ptr<const Machine> machine_;
  Options options_;
};

}  // namespace llmc
