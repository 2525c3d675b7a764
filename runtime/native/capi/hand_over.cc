// llmc_engine_export_blocks, llmc_engine_import_blocks: the C boundary of handed-over KV blocks.
#include "capi/c_engine.h"
#include "core/c_struct.h"
#include "core/error.h"

extern "C" {

llmc_status llmc_engine_export_blocks(llmc_engine* engine, const int32_t* token_ids, uint64_t num_tokens,
                                      uint64_t first_block, void* out, uint64_t capacity, uint64_t* num_blocks,
                                      uint64_t* num_bytes, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    if (engine == nullptr) return llmc::NullArgument("engine");
    if (token_ids == nullptr && num_tokens > 0) return llmc::NullArgument("token_ids");
    if (out == nullptr && capacity > 0) return llmc::NullArgument("out");
    if (num_blocks == nullptr) return llmc::NullArgument("num_blocks");
    if (num_bytes == nullptr) return llmc::NullArgument("num_bytes");
    return engine->engine->ExportBlocks(token_ids, num_tokens, first_block, static_cast<unsigned char*>(out), capacity,
                                        num_blocks, num_bytes);
  });
}

llmc_status llmc_engine_import_blocks(llmc_engine* engine, const int32_t* token_ids, uint64_t num_tokens,
                                      const void* data, uint64_t num_bytes, uint64_t* num_blocks, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    if (engine == nullptr) return llmc::NullArgument("engine");
    if (token_ids == nullptr && num_tokens > 0) return llmc::NullArgument("token_ids");
    if (data == nullptr) return llmc::NullArgument("data");
    if (num_blocks == nullptr) return llmc::NullArgument("num_blocks");
    return engine->engine->ImportBlocks(token_ids, num_tokens, data, num_bytes, num_blocks);
  });
}

}  // extern "C"
