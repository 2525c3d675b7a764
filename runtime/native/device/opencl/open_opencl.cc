#include "device/opencl/open_opencl.h"

#include <utility>

#include "device/gpu/open_gpu.h"
#include "device/opencl/opencl_device.h"

namespace llmc {
namespace {

using OpenOpenCl = OpenGpu<ClMachine, OpenClDevice, OpenClDeviceOptions>;

Status Open(const DeviceOptions& given, std::unique_ptr<OpenDevice>* out) {
  ClChoice choice;
  OpenClDeviceOptions options;
  OptionReader reader("opencl", given);
  reader.Text("library", &choice.library);
  reader.Number("device", 1024, &choice.device);
  options.graphs.Read(&reader);
  reader.Flag("sample", &options.sample);
  uint32_t offload_mib = 0;
  reader.Number("offload_mib", UINT32_MAX, &offload_mib);
  options.offload = {uint64_t{offload_mib} << 20, 0};
  reader.Text("cache", &options.cache_folder);
  reader.Flag("overlap", &options.overlap);
  reader.Number("local_rank", 1024, &choice.local_rank);
  LLMC_RETURN_IF_ERROR(reader.Finish());
  std::shared_ptr<const ClMachine> machine;
  LLMC_RETURN_IF_ERROR(ClMachine::Open(choice, &machine));
  options.sample = options.sample && machine->has_doubles();
  *out = std::make_unique<OpenOpenCl>(std::move(machine), std::move(options));
  return Status::Ok();
}

}  // namespace

const DeviceKind kOpenClKind = {"opencl", "A GPU, or the CPU, by its OpenCL driver.", Open};

}  // namespace llmc
