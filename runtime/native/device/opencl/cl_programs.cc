#include "device/opencl/cl_programs.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/crc32.h"
#include "device/gpu/gpu_sampling.h"

namespace llmc {
namespace {

constexpr const char* kKind = "opencl";
constexpr size_t kMostLog = 600;
constexpr std::string_view kNextProgram = "\n//// program\n";
constexpr std::string_view kUsesDoubles = "cl_khr_fp64";

}  // namespace

ClPrograms::~ClPrograms() {
  for (cl_kernel kernel : kernels_) {
    if (kernel != nullptr) (*machine_)->ReleaseKernel(kernel);
  }
  for (const Program& one : programs_) (*machine_)->ReleaseProgram(one.program);
}

Status ClPrograms::Build(const std::shared_ptr<const ClMachine>& machine, const Artifact& artifact,
                         const std::string& cache_folder, const ClPrograms* known, std::unique_ptr<ClPrograms>* out) {
  LLMC_RETURN_IF_ERROR(CheckGpuTarget(artifact, kKind, kMaxClLevel));
  LLMC_RETURN_IF_ERROR(BuildFor(machine->lanes(), machine, artifact, cache_folder, known, out));
  const ClPrograms& made = **out;
  for (size_t i = 0; i < made.kernels_.size(); ++i) {
    if (made.kernels_[i] == nullptr || machine->HasLanes(made.kernels_[i], made.launches_[i].items)) continue;
    // The driver chose other subgroups for this kernel than for the one that was looked at.
    return BuildFor(ClLanes{}, machine, artifact, cache_folder, known, out);
  }
  return Status::Ok();
}

Status ClPrograms::BuildFor(const ClLanes& lanes, std::shared_ptr<const ClMachine> machine, const Artifact& artifact,
                            const std::string& cache_folder, const ClPrograms* known,
                            std::unique_ptr<ClPrograms>* out) {
  const ClMachine& cl = *machine;
  std::unique_ptr<ClPrograms> made(
      new ClPrograms(std::move(machine), cl.keeps_programs() ? "" : cache_folder, cl.build_options(lanes)));
  for (const KernelRecord& kernel : artifact.kernels()) {
    GpuLaunch launch;
    LLMC_RETURN_IF_ERROR(ReadLaunch(artifact, kernel, cl.group_items(), &launch));
    made->launches_.push_back(launch);
  }
  std::vector<size_t> first_of(1, 0);  // first program of each code file
  for (size_t i = 0; i < artifact.code().size(); ++i) {
    const MappedFile& file = artifact.code_file(i);
    const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
    for (size_t at = 0; at <= text.size();) {
      const size_t end = std::min(text.find(kNextProgram, at), text.size());
      if (!cl.has_doubles() && text.substr(at, end - at).find(kUsesDoubles) != std::string_view::npos) {
        at = end + kNextProgram.size();
        continue;
      }
      made->programs_.emplace_back();
      LLMC_RETURN_IF_ERROR(made->BuildProgram(artifact.code_name(artifact.code()[i]), text.data() + at, end - at, known,
                                              &made->programs_.back()));
      made->num_cached_ += made->programs_.back().cached ? 1 : 0;
      at = end + kNextProgram.size();
    }
    first_of.push_back(made->programs_.size());
  }
  made->kernels_.reserve(artifact.kernels().size());
  for (const KernelRecord& kernel : artifact.kernels()) {
    cl_kernel found = nullptr;
    for (size_t i = first_of[kernel.code]; found == nullptr && i < first_of[kernel.code + 1]; ++i) {
      cl_int code = kClSuccess;
      found = cl->CreateKernel(made->programs_[i].program, artifact.symbol(kernel), &code);
      if (code != kClSuccess) {
        found = nullptr;
        continue;
      }
      made->kernels_.push_back(found);
      made->symbols_.emplace_back(made->programs_[i].program, artifact.symbol(kernel));
    }
    if (found == nullptr && !cl.has_doubles()) {
      if (!DrawsTokens(kernel)) {
        return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET,
                             std::string("Kernel '") + artifact.symbol(kernel) +
                                 "' computes in double precision, which the OpenCL device '" + cl.name() +
                                 "' does not have; compile the model again, or choose another device.");
      }
      // The host draws tokens.
      made->kernels_.push_back(nullptr);
      made->symbols_.emplace_back(nullptr, artifact.symbol(kernel));
      continue;
    }
    if (found == nullptr) {
      return artifact.Corrupt(artifact.code_name(artifact.code()[kernel.code]),
                              std::string("it has no kernel '") + artifact.symbol(kernel) + "'");
    }
  }
  *out = std::move(made);
  return Status::Ok();
}

Status ClPrograms::Another(uint32_t index, cl_kernel* out) const {
  const auto& [program, symbol] = symbols_[index];
  cl_int code = kClSuccess;
  *out = (*machine_)->CreateKernel(program, symbol.c_str(), &code);
  LLMC_RETURN_IF_CL_ERROR("Making kernel '" + symbol + "' on '" + machine_->name() + "'", code);
  return Status::Ok();
}

Status ClPrograms::BuildProgram(const std::string& name, const char* source, size_t bytes, const ClPrograms* known,
                                Program* out) {
  const ClMachine& cl = *machine_;
  out->key = cl.name() + "\n" + cl.driver() + "\n" + options_ + "\n" + std::to_string(bytes) + " " +
             std::to_string(Crc32(source, bytes)) + " " + std::to_string(HashOf(source, bytes));
  for (size_t i = 0; known != nullptr && i < known->programs_.size(); ++i) {
    if (known->programs_[i].key != out->key) continue;
    LLMC_RETURN_IF_CL_ERROR("Keeping " + name + " on '" + cl.name() + "'",
                            cl->RetainProgram(known->programs_[i].program));
    *out = known->programs_[i];
    return Status::Ok();
  }
  const cl_device_id device = cl.device();
  const std::vector<unsigned char> binary = cache_.Read(out->key);
  // A binary that the driver no longer accepts is built anew.
  if (!binary.empty() && FromBinary(binary, out).ok()) return Status::Ok();
  cl_int code = kClSuccess;
  cl_program program = cl->CreateProgramWithSource(cl.context(), 1, &source, &bytes, &code);
  LLMC_RETURN_IF_CL_ERROR("Reading " + name + " on '" + cl.name() + "'", code);
  code = cl->BuildProgram(program, 1, &device, options_.c_str(), nullptr, nullptr);
  if (code == kClSuccess) {
    out->program = program;
    return Status::Ok();
  }
  const std::string log = Log(program);
  cl->ReleaseProgram(program);
  if (code != kClBuildProgramFailure) return ClError("Building " + name + " on '" + cl.name() + "'", code);
  return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET,
                       name + " does not build on '" + cl.name() + "': " + log + "; choose another device.");
}

Status ClPrograms::FromBinary(const std::vector<unsigned char>& binary, Program* out) const {
  const ClMachine& cl = *machine_;
  const size_t bytes = binary.size();
  const unsigned char* data = binary.data();
  const cl_device_id device = cl.device();
  cl_int taken = kClSuccess, code = kClSuccess;
  cl_program program = cl->CreateProgramWithBinary(cl.context(), 1, &device, &bytes, &data, &taken, &code);
  if (code == kClSuccess) code = taken;
  if (code == kClSuccess) {
    code = cl->BuildProgram(program, 1, &device, options_.c_str(), nullptr, nullptr);
  }
  if (code == kClSuccess) {
    out->program = program;
    out->cached = true;
    return Status::Ok();
  }
  if (program != nullptr) cl->ReleaseProgram(program);
  return ClError("Reading a binary", code);
}

std::string ClPrograms::Log(cl_program program) const {
  const ClMachine& cl = *machine_;
  size_t bytes = 0;
  if (cl->GetProgramBuildInfo(program, cl.device(), kClProgramBuildLog, 0, nullptr, &bytes) != kClSuccess ||
      bytes == 0) {
    return "the driver does not say why";
  }
  std::string text(bytes, '\0');
  if (cl->GetProgramBuildInfo(program, cl.device(), kClProgramBuildLog, bytes, text.data(), nullptr) != kClSuccess) {
    return "the driver does not say why";
  }
  text.resize(std::min(text.find_last_not_of(std::string("\0\n ", 3)) + 1, kMostLog));
  return text;
}

void ClPrograms::Store() const {
  if (!cache_.kept()) return;
  const ClMachine& cl = *machine_;
  for (const Program& one : programs_) {
    size_t bytes = 0;
    if (one.cached ||
        cl->GetProgramInfo(one.program, kClProgramBinarySizes, sizeof(bytes), &bytes, nullptr) != kClSuccess ||
        bytes == 0) {
      continue;
    }
    std::vector<unsigned char> binary(bytes);
    unsigned char* data = binary.data();
    if (cl->GetProgramInfo(one.program, kClProgramBinaries, sizeof(data), static_cast<void*>(&data), nullptr) ==
        kClSuccess) {
      cache_.Write(one.key, binary);
    }
  }
}

}  // namespace llmc
