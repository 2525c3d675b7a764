#include "device/cuda/open_cuda.h"

#include <iterator>
#include <utility>

#include "device/cuda/cuda_device.h"
#include "device/gpu/open_gpu.h"

namespace llmc {
namespace {

using OpenCuda = OpenGpu<CuMachine, CudaDevice, CudaOptions>;

Status OpenCudaDevice(const DeviceOptions& given, std::unique_ptr<OpenDevice>* out) {
  constexpr uint32_t kMostMib = 1 << 24;
  CuChoice choice;
  CudaOptions options;
  uint32_t offload_mib = 0, ring_mib = UINT32_MAX, way = 0;
  OptionReader reader("cuda", given);
  reader.Text("library", &choice.library);
  reader.Number("device", 1024, &choice.device);
  options.graphs.Read(&reader);
  reader.Flag("sample", &options.sample);
  reader.Number("offload_mib", kMostMib, &offload_mib);
  reader.Number("offload_ring_mib", kMostMib, &ring_mib);
  reader.Flag("overlap", &options.overlap);
  reader.Flag("dependent_launches", &options.early);
  reader.Number("local_rank", 1024, &choice.local_rank);
  reader.Choice("collective", {std::begin(kCollectiveWays), std::end(kCollectiveWays)}, &way);
  reader.Text("nccl_library", &options.nccl.library);
  LLMC_RETURN_IF_ERROR(reader.Finish());
  options.offload.bytes = uint64_t{offload_mib} << 20;
  if (ring_mib != UINT32_MAX) options.offload.ring_bytes = uint64_t{ring_mib} << 20;
  options.nccl.way = static_cast<CollectiveWay>(way);
  CuMachinePtr machine;
  LLMC_RETURN_IF_ERROR(CuMachine::Open(choice, &machine));
  *out = std::make_unique<OpenCuda>(std::move(machine), options);
  return Status::Ok();
}

}  // namespace

const DeviceKind kCudaKind = {"cuda", "An NVIDIA GPU, by its driver.", OpenCudaDevice};

}  // namespace llmc
