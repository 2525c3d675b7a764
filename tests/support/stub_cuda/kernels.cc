// Modules and launches.
#include "kernels.h"

#include <dlfcn.h>

#include "streams.h"

namespace stub_cuda {
namespace {

// The kernels that a text of PTX has.
void Entries(const char* text, Module* module) {
  for (const char* at = std::strstr(text, ".entry "); at; at = std::strstr(at, ".entry ")) {
    at += 7;
    auto kernel = std::make_unique<Kernel>();
    const char* open = std::strchr(at, '(');
    const char* close = open ? std::strchr(open, ')') : nullptr;
    if (!close) return;
    kernel->name.assign(at, open);
    for (const char* param = open; (param = std::strstr(param, ".param .")) && param < close; ++param) {
      kernel->sizes.push_back(param[9] == '6' ? 8 : 4);
    }
    const char* begins = std::strstr(close, "llmc_let_later_begin();");
    const char* waits = std::strstr(close, "llmc_await_earlier();");
    kernel->awaits = begins && waits && begins < waits;
    const char* most = std::strstr(close, ".maxntid ");
    const char* body = std::strchr(close, '{');
    if (most && (!body || most < body)) kernel->most_items = static_cast<unsigned>(std::atoi(most + 9));
    module->kernels.push_back(std::move(kernel));
  }
}

// The kernels of machine code: an ELF file whose sections .nv.info.NAME list the arguments.
int Elf(const unsigned char* image, int capability, Module* module) {
  const auto at = [&](auto* out, uint64_t offset) { std::memcpy(out, image + offset, sizeof(*out)); };
  uint16_t machine = 0, count = 0, names = 0;
  uint32_t flags = 0;
  uint64_t sections = 0;
  at(&machine, 18), at(&flags, 48), at(&sections, 40), at(&count, 60), at(&names, 62);
  const int built = image[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff;
  if (machine != 190) return Wrong("a module of another machine", kInvalidImage);
  if (built / 10 != capability / 10 || built > capability) return kNoBinary;
  const auto section = [&](uint16_t index, uint32_t* name, uint64_t* offset, uint64_t* bytes) {
    at(name, sections + index * 64), at(offset, sections + index * 64 + 24), at(bytes, sections + index * 64 + 32);
  };
  uint32_t name = 0;
  uint64_t strings = 0, bytes = 0;
  section(names, &name, &strings, &bytes);
  for (uint16_t i = 0; i < count; ++i) {
    uint64_t offset = 0;
    section(i, &name, &offset, &bytes);
    const std::string title = reinterpret_cast<const char*>(image + strings + name);
    if (title.rfind(".nv.info.", 0) != 0) continue;
    auto kernel = std::make_unique<Kernel>();
    kernel->name = title.substr(9);
    std::map<int, int> sizes;
    for (uint64_t a = offset; a + 4 <= offset + bytes;) {
      const int format = image[a], attribute = image[a + 1];
      uint16_t size = 0;
      at(&size, a + 2);
      if (format == 4 && attribute == 0x17) {  // one argument
        uint16_t ordinal = 0;
        uint32_t packed = 0;
        at(&ordinal, a + 8), at(&packed, a + 12);
        sizes[ordinal] = static_cast<int>(packed >> 18 & 0x3fff);
      }
      a += 4 + (format == 4 ? size : 0);
    }
    for (const auto& [ordinal, bytes_of] : sizes) kernel->sizes.push_back(bytes_of);
    module->kernels.push_back(std::move(kernel));
  }
  return kOk;
}

using OnHost = void (*)(void**, unsigned groups, unsigned items);

}  // namespace

int Take(const char* name, Kernel* kernel, const unsigned* grid, const unsigned* block, unsigned shared,
         void** arguments, Launch* out) {
  if (!kernel) return kInvalidHandle;
  const std::string what = std::string(name) + " of " + kernel->name;
  if (grid[0] < 1 || grid[0] > 65536 || grid[1] != 1 || grid[2] != 1) return Wrong(what + ": its grid");
  if (block[0] < 1 || block[0] > kernel->most_items || block[1] != 1 || block[2] != 1)
    return Wrong(what + ": its groups");
  if (shared != 0) return Wrong(what + ": shared memory that nobody uses");
  *out = {kernel, grid[0], block[0], {}};
  for (const int size : kernel->sizes) {
    uint64_t value = 0;
    if (!arguments || !*arguments) return Wrong(what + ": an argument is missing");
    std::memcpy(&value, *arguments++, static_cast<size_t>(size));
    const bool known = Inside(world().memory, Of(value), 4) || Inside(world().pinned, Of(value), 4);
    if (size == 8 && (value % 64 || !known)) {
      return Wrong(what + ": an argument is no memory of the GPU");
    }
    out->values.push_back(value);
  }
  return kOk;
}

std::vector<const void*> Uses(const Launch& launch) {
  std::vector<const void*> uses = {launch.kernel};
  for (size_t i = 0; i < launch.values.size(); ++i) {
    if (launch.kernel->sizes[i] == 8) uses.push_back(Of(launch.values[i]));
  }
  return uses;
}

void Run(const Launch& launch, const char* how) {
  World& w = world();
  std::vector<uint64_t> values = launch.values;
  std::vector<void*> arguments;
  for (uint64_t& value : values) arguments.push_back(&value);
  w.launched.push_back(launch.kernel->name + " " + std::to_string(launch.groups) + " " + how +
                       (launch.early ? "+" : ""));
  const char* path = std::getenv("STUB_CUDA_KERNELS");
  if (!path) return;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const auto run = library ? reinterpret_cast<OnHost>(dlsym(library, ("run_" + launch.kernel->name).c_str())) : nullptr;
  if (!run) return static_cast<void>(Wrong("no kernel " + launch.kernel->name + " for the host"));
  run(arguments.data(), launch.groups, launch.items);
}

}  // namespace stub_cuda

using namespace stub_cuda;

API cuModuleLoadDataEx(void** out, const void* image, unsigned count, int* options, void** values) {
  BEGIN("ModuleLoadData", true)
  const auto* bytes = static_cast<const unsigned char*>(image);
  const int capability = static_cast<int>(Fact("capability", 90));
  auto module = std::make_unique<Module>();
  if (!std::memcmp(bytes,
                   "\x7f"
                   "ELF",
                   4)) {
    if (count) return Wrong("options for machine code that is not built");
    if (const int code = Elf(bytes, capability, module.get())) return code;
  } else {
    // Of a compiler that stands in for nvcc: machine code is text, too.
    const auto* text = static_cast<const char*>(image);
    const bool cubin = !std::strncmp(text, "CUBIN", 5);
    const char* machine = std::strstr(text, ".target sm_");
    if (!machine) return Wrong("a module that is neither machine code nor PTX", kInvalidImage);
    const int built = std::atoi(machine + 11);
    if (built > capability || (cubin && built / 10 != capability / 10)) return Wrong("a module for others", kNoBinary);
    if (cubin && count) return Wrong("options for machine code that is not built");
    if (!cubin && (count != 2 || options[0] != 5 || options[1] != 6)) return Wrong("PTX is built without a log");
    if (!cubin && Fact("builds", 1) == 0) {
      std::strncpy(static_cast<char*>(values[0]), "line 1: no such word", reinterpret_cast<size_t>(values[1]));
      return 218;
    }
    Entries(text, module.get());
  }
  if (module->kernels.size() != 1) return Wrong("a module of " + std::to_string(module->kernels.size()) + " kernels");
  world().alive[module.get()] = "module";
  *out = module.release();
  return kOk;
}
API cuModuleUnload(void* module) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* of = Alive<Module>(module, "module", "cuModuleUnload");
  if (of) {
    for (const auto& kernel : of->kernels) {
      if (Used(kernel.get())) Wrong("a module is unloaded while a stream uses it");
      world().alive.erase(kernel.get());
    }
  }
  return End<Module>(module, "module", "cuModuleUnload");
}
API cuModuleGetFunction(void** out, void* module, const char* name) {
  BEGIN("ModuleGetFunction", true)
  auto* of = Alive<Module>(module, "module", "cuModuleGetFunction");
  if (!of) return kInvalidHandle;
  for (const auto& kernel : of->kernels) {
    if (kernel->name != name) continue;
    world().alive[kernel.get()] = "kernel";
    *out = kernel.get();
    return kOk;
  }
  return kNotFound;
}
API cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  BEGIN("LaunchKernel", true)
  auto* s = Alive<Stream>(stream, "stream", "cuLaunchKernel");
  if (!s) return kInvalidHandle;
  if (extra) return Wrong("arguments in two ways");
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  Launch launch;
  if (const int code = Take("cuLaunchKernel", Alive<Kernel>(kernel, "kernel", "cuLaunchKernel"), grid, block, shared,
                            arguments, &launch)) {
    return code;
  }
  return AddWaiting(s, Uses(launch), [=](const char* how) { return Run(launch, how), true; }, true);
}
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char room[64];
    int allowed;
  } value;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
// A kernel that may begin early needs a GPU and a driver that do so, has to wait by itself, and is behind another kernel.
API cuLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments, void** extra) {
  BEGIN("LaunchKernelEx", true)
  auto* s = Alive<Stream>(config->stream, "stream", "cuLaunchKernelEx");
  if (!s) return kInvalidHandle;
  if (extra) return Wrong("arguments in two ways");
  if (config->count != 1 || config->attributes->id != 6 || config->attributes->value.allowed != 1) {
    return Wrong("a launch with other attributes than that it may begin early");
  }
  if (Fact("capability", 90) < 90 || Fact("driver", 13000) < 12030) return Wrong("a launch of newer GPUs or drivers");
  auto* of = Alive<Kernel>(kernel, "kernel", "cuLaunchKernelEx");
  if (of && !of->awaits) return Wrong("a kernel begins early that does not wait: " + of->name);
  const Capture& c = s->captured;
  const bool behind = c.graph              ? c.last.size() == 1 && c.graph->nodes[c.last[0]]->kernel
                      : s->waiting.empty() ? s->done > 0
                                           : s->waiting.back().kernel;
  if (!behind) return Wrong("a kernel begins early that is behind no kernel: " + (of ? of->name : ""));
  Launch launch;
  if (const int code = Take("cuLaunchKernelEx", of, config->grid, config->block, config->shared, arguments, &launch)) {
    return code;
  }
  launch.early = true;
  return AddWaiting(s, Uses(launch), [=](const char* how) { return Run(launch, how), true; }, true);
}
