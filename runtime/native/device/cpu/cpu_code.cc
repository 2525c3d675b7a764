#include "device/cpu/cpu_code.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "core/isa.h"
#include "core/mapped_file.h"

namespace llmc {
namespace {

constexpr const char* kKind = "cpu";
constexpr uint32_t kMaxWeightParts = 2;

// offset + bytes <= limit, without overflow.
bool InRange(uint64_t offset, uint64_t bytes, uint64_t limit) { return offset <= limit && bytes <= limit - offset; }

// A truncated shared object can crash the dynamic loader: headers and their ranges are checked first.
bool IsWholeSharedObject(const MappedFile& file) {
  Elf64_Ehdr header;
  if (file.size() < sizeof(header)) return false;
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_DYN) {
    return false;
  }
  if (header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum == 0) return false;
  if (!InRange(header.e_phoff, uint64_t{header.e_phnum} * sizeof(Elf64_Phdr), file.size())) return false;
  if (header.e_shnum && !InRange(header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize, file.size())) {
    return false;
  }
  for (uint32_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr program;
    std::memcpy(&program, file.data() + header.e_phoff + i * sizeof(program), sizeof(program));
    if (program.p_type != PT_NULL && !InRange(program.p_offset, program.p_filesz, file.size())) return false;
  }
  return true;
}

#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
#elif defined(__riscv)
constexpr uint16_t kMachine = EM_RISCV;
#else
constexpr uint16_t kMachine = EM_NONE;  // the loader decides
#endif

// As compilers name it, or by the number of its ELF machine.
std::string MachineName(uint16_t machine) {
  switch (machine) {
    case EM_X86_64: return "x86-64";
    case EM_AARCH64: return "aarch64";
    case EM_RISCV: return "riscv64";
    default: return "another architecture (ELF machine " + std::to_string(machine) + ")";
  }
}

// dlopen returns a library loaded earlier under the same name, even if the file was replaced since. For a spelling of
// the path that is new to this process it compares inodes instead.
std::string FreshSpelling(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  const std::size_t slash = path.rfind('/');
  std::string fresh = path.substr(0, slash);
  for (uint64_t bits = counter.fetch_add(1) + 2; bits > 1; bits >>= 1) fresh += bits & 1 ? "//." : "/.";
  return fresh + path.substr(slash);
}

Status Unsupported(const Artifact& artifact, const std::string& what) {
  return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET, "the artifact '" + artifact.directory() + "' " + what);
}

// Of a whole shared object.
Status CheckMachine(const Artifact& artifact, const MappedFile& file) {
  Elf64_Ehdr header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (kMachine == EM_NONE || header.e_machine == kMachine) return Status::Ok();
  return Unsupported(artifact, "was compiled for " + MachineName(header.e_machine) + " (target " +
                                   artifact.target().name + ") and this machine is " + MachineName(kMachine) +
                                   "; compile it for this machine");
}

Status CheckTarget(const Artifact& artifact) {
  const TargetFacts& target = artifact.target();
  if (target.kind != kKind) {
    return Unsupported(artifact, "is for devices of kind '" + target.kind + "' (target " + target.name +
                                     ") and this one is of kind 'cpu'; open one of that kind, or compile it for this");
  }
  const uint32_t level = target.level, machine = MachineIsaLevel();
  if (level > kMaxIsaLevel) {
    return Unsupported(artifact, "needs ISA level " + std::to_string(level) + " and this runtime knows levels up to " +
                                     std::to_string(kMaxIsaLevel) + "; use a newer llmc");
  }
  if (level > machine) {
    return Unsupported(artifact, std::string("was compiled for ") + IsaName(level) + " (level " +
                                     std::to_string(level) + ") and this CPU has " + IsaName(machine) + " (level " +
                                     std::to_string(machine) + "); compile it for this machine");
  }
  if (!EnableIsaLevel(level)) {
    return Unsupported(artifact, std::string("needs the tile registers of ") + IsaName(level) +
                                     ", which the operating system refuses; compile it for level 4");
  }
  return Status::Ok();
}

}  // namespace

CpuCode::~CpuCode() {
  for (void* library : libraries_) ::dlclose(library);
}

Status CpuCode::Load(const Artifact& artifact, std::shared_ptr<const CpuCode>* out) {
  LLMC_RETURN_IF_ERROR(CheckTarget(artifact));
  auto code = std::make_shared<CpuCode>();
  code->libraries_.reserve(artifact.code().size());
  for (std::size_t i = 0; i < artifact.code().size(); ++i) {
    const std::string name = artifact.code_name(artifact.code()[i]);
    const MappedFile& file = artifact.code_file(i);
    if (!IsWholeSharedObject(file)) {
      return artifact.Corrupt(name, "it is not a complete shared object");
    }
    LLMC_RETURN_IF_ERROR(CheckMachine(artifact, file));
    LLMC_RETURN_IF_ERROR(file.CheckLoadable());  // no other file would help, and glibc keeps what it had mapped by then
    void* library = ::dlopen(FreshSpelling(file.PathToOpen()).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char* why = ::dlerror();
      return artifact.Corrupt(name, std::string("the loader says: ") + (why ? why : "unknown error"));
    }
    code->libraries_.push_back(library);
  }
  code->functions_.reserve(artifact.kernels().size());
  code->ranges_.resize(code->libraries_.size());
  for (const KernelRecord& kernel : artifact.kernels()) {
    const char* symbol = artifact.symbol(kernel);
    if (LaunchOf(kernel).weight_parts > kMaxWeightParts) {
      return artifact.Corrupt("graphs.bin", std::string("kernel '") + symbol + "' has " +
                                                std::to_string(LaunchOf(kernel).weight_parts) +
                                                " weight parts, more than 2");
    }
    void* function = ::dlsym(code->libraries_[kernel.code], symbol);
    if (!function) {
      return artifact.Corrupt(artifact.code_name(artifact.code()[kernel.code]),
                              std::string("it has no kernel '") + symbol + "'");
    }
    code->functions_.push_back(function);
    Range& range = code->ranges_[kernel.code];
    const char* address = static_cast<const char*>(function);
    range.first = range.first == nullptr ? address : std::min(range.first, address);
    range.last = std::max(range.last, address);
  }
  *out = std::move(code);
  return Status::Ok();
}

void CpuCode::Touch() const {
  constexpr std::ptrdiff_t kPageBytes = 4096;
  for (const Range& range : ranges_) {
    const volatile char* byte = range.first;
    for (; range.last - byte > kPageBytes; byte += kPageBytes) static_cast<void>(*byte);
    if (range.last != nullptr) static_cast<void>(*static_cast<const volatile char*>(range.last));
  }
}

}  // namespace llmc
