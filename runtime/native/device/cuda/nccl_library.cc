#include "device/cuda/nccl_library.h"

#include <dlfcn.h>

namespace llmc {
namespace {

const char* NcclErrorName(NcclResult code) {
  switch (code) {
    case 1: return "a call of CUDA failed";
    case 2: return "a call of the system failed";
    case 3: return "NCCL itself failed";
    case 4:
    case 5: return "NCCL refuses the call";
    case 6: return "another rank has failed, or cannot be reached";
    default: return "unknown error";
  }
}

}  // namespace

Status NcclLibrary::Load(const std::string& path, std::shared_ptr<const NcclLibrary>* out) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status::Error(LLMC_ERR_NOT_FOUND, "NCCL cannot be loaded (" +
                                                 std::string(why != nullptr ? why : "unknown error") +
                                                 "); install it, or name the library with nccl_library=.");
  }
  auto loaded = std::make_shared<NcclLibrary>();
  const char* missing = nullptr;
#define LLMC_NCCL_FIND(name, symbol, arguments)                                       \
  loaded->name = reinterpret_cast<NcclResult(*) arguments>(::dlsym(library, symbol)); \
  if (loaded->name == nullptr && missing == nullptr) missing = symbol;
  LLMC_NCCL_FUNCTIONS(LLMC_NCCL_FIND)
#undef LLMC_NCCL_FIND
  if (missing != nullptr) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "The library " + path + " is not NCCL 2.14 or later: it has no " +
                                                 missing + "; install a newer one.");
  }
  *out = std::move(loaded);
  return Status::Ok();
}

std::string NcclVersionText(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Status NcclError(const std::string& doing, NcclResult code) {
  return Status::Error(LLMC_ERR_INTERNAL, doing + " failed: " + NcclErrorName(code) + " (NCCL error " +
                                              std::to_string(code) +
                                              "); set NCCL_DEBUG=WARN to see why, or choose collective=host.");
}

}  // namespace llmc
