// Status: how internal functions report failure. It is converted to llmc_status + llmc_error at the C boundary.
#pragma once
#include <string>
#include <utility>

#include "llmc/llmc.h"

namespace llmc {

struct [[nodiscard]] Status {
  llmc_status code = LLMC_OK;
  std::string message;
  bool ok() const { return code == LLMC_OK; }
  static Status Ok() { return {}; }
  static Status Error(llmc_status code, std::string message) { return {code, std::move(message)}; }
  static Status Invalid(std::string message) { return Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }
};

// Whether a device goes on behind its error, and only what was on its way has failed.
inline bool DeviceGoesOn(const Status& error) {
  return error.code == LLMC_ERR_DEVICE_FAILED || error.code == LLMC_ERR_OUT_OF_MEMORY;
}

#define LLMC_RETURN_IF_ERROR(expr)     \
  do {                                 \
    ::llmc::Status status_ = (expr);   \
    if (!status_.ok()) return status_; \
  } while (0)

}  // namespace llmc
