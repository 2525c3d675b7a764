#include "core/error.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/c_struct.h"

namespace llmc {

llmc_status ToC(const Status& status, llmc_error* error) noexcept {
  constexpr size_t kHeader = offsetof(llmc_error, message);
  if (error == nullptr || error->struct_size <= kHeader) return status.code;
  error->code = status.code;
  const char* text = status.message.c_str();
  size_t length = status.message.size();
  if (length == 0 && status.code == LLMC_ERR_OUT_OF_MEMORY) {
    text = "Out of memory: lower max_num_seqs, or kv_bytes or num_blocks.";
    length = std::strlen(text);
  }
  CopyText(text, length, std::min<size_t>(error->struct_size - kHeader, sizeof(error->message)), error->message);
  return status.code;
}

void CopyText(const char* text, size_t length, size_t room, char* out) noexcept {
  size_t n = std::min(length, room - 1);
  // A UTF-8 character that does not fit is left out whole.
  while (n > 0 && n < length && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  std::memcpy(out, text, n);
  out[n] = 0;
}

}  // namespace llmc

extern "C" {

void llmc_error_init(llmc_error* error, uint32_t struct_size) {
  static const llmc_error defaults{};
  llmc::InitStruct(defaults, struct_size, error);
}

const char* llmc_version(void) { return "0.1.0"; }
uint32_t llmc_abi_version(void) { return LLMC_ABI_VERSION; }

}  // extern "C"
