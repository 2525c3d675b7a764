// Converts an internal Status for the C boundary.
#pragma once
#include <cstddef>
#include <exception>
#include <new>
#include <string>

#include "core/status.h"

namespace llmc {

// Fills *error (may be NULL), honouring its struct_size, and returns the code.
llmc_status ToC(const Status& status, llmc_error* error) noexcept;

// Copies as much of `text` as fits, and a NUL, to out, which has room for `room` bytes, at least 1.
void CopyText(const char* text, size_t length, size_t room, char* out) noexcept;

// Runs body() and turns every exception into a Status: no exception may unwind into C.
template <typename Body>
llmc_status Guard(llmc_error* error, Body body) noexcept {
  try {
    return ToC(body(), error);
  } catch (const std::bad_alloc&) {
    Status status;
    status.code = LLMC_ERR_OUT_OF_MEMORY;
    llmc_status code = ToC(status, error);
    return code;
  } catch (const std::exception& e) {
    try {
      return ToC(Status::Error(LLMC_ERR_INTERNAL, std::string("Internal error: ") + e.what() + "."), error);
    } catch (...) {
      return LLMC_ERR_OUT_OF_MEMORY;
    }
  } catch (...) {
    return LLMC_ERR_INTERNAL;
  }
}

}  // namespace llmc
