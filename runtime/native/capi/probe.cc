// llmc_probe_* of llmc.h.
#include <memory>
#include <string>

#include "core/c_struct.h"
#include "core/error.h"
#include "device/cpu/probe.h"

struct llmc_probe {
  std::unique_ptr<llmc::Probe> probe;
};

namespace {

constexpr llmc_probe_options kProbeDefaults = {sizeof(llmc_probe_options), 0, /*pin_threads=*/1, 0, 512ull << 20};

}  // namespace

extern "C" {

void llmc_probe_options_init(llmc_probe_options* options, uint32_t struct_size) {
  llmc::InitStruct(kProbeDefaults, struct_size, options);
}

llmc_status llmc_probe_create(const llmc_probe_options* options, llmc_probe** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    if (!out) return llmc::NullArgument("out");
    llmc_probe_options chosen = kProbeDefaults;
    if (options) LLMC_RETURN_IF_ERROR(llmc::ReadStruct(options, "options", &chosen));
    auto handle = std::make_unique<llmc_probe>();
    LLMC_RETURN_IF_ERROR(
        llmc::Probe::Create(chosen.num_threads, chosen.read_bytes, chosen.pin_threads != 0, &handle->probe));
    *out = handle.release();
    return llmc::Status::Ok();
  });
}

void llmc_probe_destroy(llmc_probe* probe) { delete probe; }

llmc_status llmc_probe_measure(llmc_probe* probe, uint32_t limit, double seconds, double* rate, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    if (!probe) return llmc::NullArgument("probe");
    if (!rate) return llmc::NullArgument("rate");
    if (limit > LLMC_LIMIT_INT8) {
      return llmc::Status::Error(LLMC_ERR_INVALID_ARGUMENT, "limit is " + std::to_string(limit) +
                                                                "; use one of LLMC_LIMIT_READ … LLMC_LIMIT_INT8");
    }
    return probe->probe->Measure(static_cast<llmc::Limit>(limit), seconds, rate);
  });
}

}  // extern "C"
