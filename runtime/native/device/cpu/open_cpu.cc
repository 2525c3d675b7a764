#include "device/cpu/open_cpu.h"

#include <utility>

#include "core/isa.h"
#include "device/cpu/cpu_device.h"
#include "device/cpu/cpu_topology.h"

namespace llmc {
namespace {

class OpenCpu final : public OpenDevice {
 public:
  explicit OpenCpu(CpuDeviceOptions options) : options_(std::move(options)) {}

  Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& load,
              std::unique_ptr<Device>* out) const override {
    CpuDeviceOptions options = options_;
    options.pool = {load.num_blocks, load.num_states};
    options.adapt = !load.timed;
    options.collective = load.collective;
    options.steps_in_flight = load.steps_in_flight;
    if (const auto* beside = dynamic_cast<const CpuDevice*>(load.beside)) options.team = beside->team();
    std::unique_ptr<CpuDevice> device;
    LLMC_RETURN_IF_ERROR(CpuDevice::Create(std::move(artifact), options, &device));
    *out = std::move(device);
    return Status::Ok();
  }

  std::vector<std::pair<std::string, std::string>> Facts() const override {
    const CpuPlan plan = PlanCpus();
    const uint32_t level = MachineIsaLevel();
    return {{"level", std::to_string(level)},
            {"instructions", IsaName(level)},
            {"cpus", std::to_string(plan.cpus.size())},
            {"threads", std::to_string(options_.num_threads != 0 ? options_.num_threads : plan.num_threads())}};
  }

 private:
  CpuDeviceOptions options_;
};

Status Open(const DeviceOptions& given, std::unique_ptr<OpenDevice>* out) {
  constexpr uint32_t kMostSpinUs = 1000 * 1000 * 1000;
  CpuDeviceOptions options;
  uint32_t weights = static_cast<uint32_t>(options.weights.mode);
  OptionReader reader("cpu", given);
  reader.Number("threads", 1024, &options.num_threads);
  reader.Flag("pin", &options.pin);
  reader.Number("idle_spin_us", kMostSpinUs, &options.idle_spin_us);
  reader.Choice("weights", {"auto", "mapped", "copied"}, &weights);
  reader.Flag("eager", &options.eager);
  LLMC_RETURN_IF_ERROR(reader.Finish());
  options.weights.mode = static_cast<WeightMode>(weights);
  *out = std::make_unique<OpenCpu>(std::move(options));
  return Status::Ok();
}

}  // namespace

const DeviceKind kCpuKind = {"cpu", "Threads of this machine's CPUs, on weights and KV cache in its memory.", Open};

}  // namespace llmc
