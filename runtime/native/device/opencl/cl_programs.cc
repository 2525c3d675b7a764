#include "device/opencl/cl_programs.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/crc32.h"
#include "device/gpu/gpu_sampling.h"

namespace llmc {
namespace {

constexpr const char* kKind = "opencl";
constexpr size_t kMostLog = 600;
constexpr std::string_view kNextProgram = "\n//// program\n";
constexpr std::string_view kUsesDoubles = "cl_khr_fp64";
constexpr size_t kMostBuilders = 8;

// Names of the kernels in a program's text.
std::vector<std::string_view> SymbolsOf(std::string_view text) {
  constexpr std::string_view kKernel = "__kernel ", kReturns = "void ";
  std::vector<std::string_view> symbols;
  for (size_t at = text.find(kKernel); at != std::string_view::npos; at = text.find(kKernel, at)) {
    const size_t begin = std::min(text.find(kReturns, at), text.size() - kReturns.size()) + kReturns.size();
    at = std::min(text.find('(', begin), text.size());
    symbols.push_back(text.substr(begin, at - begin));
  }
  return symbols;
}

}  // namespace

struct ClPrograms::Source {
  std::string name;  // for messages: the file, or the one kernel in it
  std::string_view text;
  std::vector<std::string_view> symbols;
};

std::vector<ClPrograms::Source> ClPrograms::SourcesOf(const std::string& file, const MappedFile& code) {
  const std::string_view text(reinterpret_cast<const char*>(code.data()), code.size());
  std::vector<Source> sources;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(kNextProgram, at), text.size());
    Source one{file, text.substr(at, end - at), {}};
    one.symbols = SymbolsOf(one.text);
    if (one.symbols.size() == 1) one.name = "'" + std::string(one.symbols[0]) + "' of " + file;
    sources.push_back(std::move(one));
    at = end + kNextProgram.size();
  }
  return sources;
}

ClPrograms::~ClPrograms() {
  for (cl_kernel kernel : kernels_) {
    if (kernel != nullptr) (*machine_)->ReleaseKernel(kernel);
  }
  for (const Program& one : programs_) {
    if (one.program != nullptr) (*machine_)->ReleaseProgram(one.program);
  }
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
  std::vector<Source> sources;
  std::vector<std::unordered_map<std::string_view, size_t>> program_of(artifact.code().size());  // by symbol
  for (size_t i = 0; i < artifact.code().size(); ++i) {
    for (Source& source : SourcesOf(artifact.code_name(artifact.code()[i]), artifact.code_file(i))) {
      if (!cl.has_doubles() && source.text.find(kUsesDoubles) != std::string_view::npos) continue;
      for (const std::string_view symbol : source.symbols) program_of[i].emplace(symbol, sources.size());
      sources.push_back(std::move(source));
    }
  }
  LLMC_RETURN_IF_ERROR(made->BuildAll(sources, known));
  made->kernels_.reserve(artifact.kernels().size());
  for (const KernelRecord& kernel : artifact.kernels()) {
    const std::string symbol = artifact.symbol(kernel);
    const auto found = program_of[kernel.code].find(symbol);
    if (found != program_of[kernel.code].end()) {
      made->symbols_.emplace_back(made->programs_[found->second].program, symbol);
      made->kernels_.push_back(nullptr);
      LLMC_RETURN_IF_ERROR(made->Another(static_cast<uint32_t>(made->kernels_.size() - 1), &made->kernels_.back()));
      continue;
    }
    if (cl.has_doubles()) {
      return artifact.Corrupt(artifact.code_name(artifact.code()[kernel.code]), "it has no kernel '" + symbol + "'");
    }
    if (!DrawsTokens(kernel)) {
      return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET,
                           "Kernel '" + symbol + "' computes in double precision, which the OpenCL device '" +
                               cl.name() + "' does not have; compile the model again, or choose another device.");
    }
    // The host draws tokens.
    made->kernels_.push_back(nullptr);
    made->symbols_.emplace_back(nullptr, symbol);
  }
  *out = std::move(made);
  return Status::Ok();
}

Status ClPrograms::BuildAll(const std::vector<Source>& sources, const ClPrograms* known) {
  programs_.resize(sources.size());
  std::vector<Status> built(sources.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false}, out_of_memory{false};
  // Programs are begun in order, and what was begun is ended: so the error of the first that fails is always known.
  const auto build = [&] {
    while (!failed.load()) {
      const size_t i = next.fetch_add(1);
      if (i >= sources.size()) return;
      try {
        built[i] = BuildProgram(sources[i], known, &programs_[i]);
      } catch (const std::bad_alloc&) {
        out_of_memory = true;
      }
      if (!built[i].ok() || out_of_memory) failed = true;
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kMostBuilders);
  const size_t builders = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMostBuilders);
  for (size_t i = 1; i < std::min(builders, sources.size()); ++i) {
    try {
      threads.emplace_back(build);
    } catch (const std::exception&) {
      break;  // fewer threads do the work
    }
  }
  build();
  for (std::thread& thread : threads) thread.join();
  for (Status& status : built) LLMC_RETURN_IF_ERROR(std::move(status));
  if (out_of_memory) throw std::bad_alloc();
  for (const Program& one : programs_) num_cached_ += one.cached ? 1 : 0;
  return Status::Ok();
}

Status ClPrograms::Another(uint32_t index, cl_kernel* out) const {
  const auto& [program, symbol] = symbols_[index];
  cl_int code = kClSuccess;
  *out = (*machine_)->CreateKernel(program, symbol.c_str(), &code);
  LLMC_RETURN_IF_CL_ERROR("Making kernel '" + symbol + "' on '" + machine_->name() + "'", code);
  return Status::Ok();
}

Status ClPrograms::BuildProgram(const Source& of, const ClPrograms* known, Program* out) const {
  const ClMachine& cl = *machine_;
  const char* source = of.text.data();
  const size_t bytes = of.text.size();
  const std::string& name = of.name;
  out->key = cl.name() + "\n" + cl.driver() + "\n" + options_ + "\n" + std::to_string(bytes) + " " +
             std::to_string(Crc32(source, bytes)) + " " + std::to_string(HashOf(source, bytes));
  for (size_t i = 0; known != nullptr && i < known->programs_.size(); ++i) {
    if (known->programs_[i].key != out->key) continue;
    LLMC_RETURN_IF_CL_ERROR("Keeping " + name + " on '" + cl.name() + "'",
                            cl->RetainProgram(known->programs_[i].program));
    *out = known->programs_[i];
    out->stored = true;
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
    out->cached = out->stored = true;
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
    if (one.stored ||
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
