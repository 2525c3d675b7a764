#include "device/cuda/cu_programs.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace llmc {
namespace {

constexpr const char* kCuKind = "cuda";
constexpr size_t kMostJitLog = 600;

}  // namespace

Status CuPrograms::Load(CuMachinePtr machine, const Artifact& artifact, const CuPrograms* known,
                        std::shared_ptr<const CuPrograms>* out) {
  LLMC_RETURN_IF_ERROR(CheckGpuTarget(artifact, kCuKind, kMaxCuLevel));
  std::shared_ptr<CuPrograms> made(new CuPrograms(std::move(machine)));
  const CuMachine& cuda = *made->machine_;
  std::vector<uint32_t> counts(artifact.code().size());
  for (const KernelRecord& kernel : artifact.kernels()) {
    GpuLaunch launch;
    LLMC_RETURN_IF_ERROR(ReadLaunch(artifact, kernel, cuda.group_items(), &launch));
    made->launches_.push_back(launch);
    ++counts[kernel.code];
  }
  std::vector<CuCode> codes;
  for (size_t i = 0; i < counts.size(); ++i) {
    const MappedFile& file = artifact.code_file(i);
    std::string wrong;
    codes.push_back(CuCode::Read(file.data(), file.size(), counts[i], &wrong));
    if (!wrong.empty()) return artifact.Corrupt(artifact.code_name(artifact.code()[i]), wrong);
  }
  std::fill(counts.begin(), counts.end(), 0);
  if (known != nullptr) {
    made->modules_ = known->modules_;
    made->kernels_ = known->kernels_;
    made->num_built_ = known->num_built_;
    made->all_await_ = known->all_await_;
  }
  for (uint32_t index = 0; index < artifact.kernels().size(); ++index) {
    const KernelRecord& kernel = artifact.kernels()[index];
    const CuCode& code = codes[kernel.code];
    const uint32_t of_file = counts[kernel.code]++;
    if (index < made->num_kernels()) continue;
    const CuImage* image = code.Choose(of_file, cuda.capability());
    if (image == nullptr) {
      const uint32_t named = CuCode::NamedFor(cuda.capability());
      return UnsupportedArtifact(
          artifact, "has code for " + code.Architectures(of_file) + " and '" + cuda.name() + "' is sm_" +
                        std::to_string(cuda.capability()) +
                        (named == 0 ? std::string("; no kernels are written for GPUs before sm_80: use another one")
                                    : "; compile it with --target cuda:sm_" + std::to_string(named)));
    }
    made->all_await_ = made->all_await_ && code.Awaits(*image);
    LLMC_RETURN_IF_ERROR(made->LoadKernel(artifact, kernel, *image));
  }
  *out = std::move(made);
  return Status::Ok();
}

Status CuPrograms::LoadKernel(const Artifact& artifact, const KernelRecord& kernel, const CuImage& image) {
  const CuMachine& cuda = *machine_;
  const std::string symbol = artifact.symbol(kernel);
  char log[kMostJitLog + 1] = "";
  int32_t options[] = {kCuJitErrorLog, kCuJitErrorLogBytes};
  void* values[] = {log, nullptr};
  std::memcpy(static_cast<void*>(&values[1]), &kMostJitLog,
              sizeof(kMostJitLog));  // a number, where other values are pointers
  const bool ptx = image.kind == CuImage::kPtx;
  CuModule module = nullptr;
  const CuResult code = cuda->ModuleLoadData(&module, image.data, ptx ? 2 : 0, ptx ? options : nullptr,
                                             ptx ? static_cast<void**>(values) : nullptr);
  if (code != kCuSuccess) {
    std::string doing = "Loading kernel '" + symbol + "' for " + image.Name() + " on '" + cuda.name() + "'";
    if (log[0] != 0) doing += " (" + std::string(log, ::strnlen(log, kMostJitLog)) + ")";
    return cuda.Check(doing.c_str(), code);
  }
  modules_.push_back(std::make_shared<const CuOwned<CuModule, CuUnload>>(machine_, module));
  CuFunction found = nullptr;
  const CuResult found_code = cuda->ModuleGetFunction(&found, module, symbol.c_str());
  if (found_code == kCuNotFound) {
    return artifact.Corrupt(artifact.code_name(artifact.code()[kernel.code]), "it has no kernel '" + symbol + "'");
  }
  LLMC_RETURN_IF_ERROR(cuda.Check("Finding a kernel", found_code));
  kernels_.push_back(found);
  num_built_ += ptx ? 1 : 0;
  return Status::Ok();
}

}  // namespace llmc
