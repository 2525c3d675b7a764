// llmc_hand_over_*: the C boundary of handed-over KV blocks.
#include <memory>
#include <vector>

#include "capi/c_engine.h"
#include "core/c_struct.h"
#include "core/error.h"

struct llmc_hand_over {
  llmc::Engine* engine;
  llmc::HandedText text;
  llmc::MadeHere made;
};

namespace {

// What nearly all calls need.
llmc::Status CheckArguments(const llmc_hand_over* hand_over, const void* bytes, uint64_t num_bytes) {
  if (hand_over == nullptr) return llmc::NullArgument("hand_over");
  LLMC_RETURN_IF_ERROR(hand_over->made.Check("hand_over"));
  if (bytes == nullptr && num_bytes > 0) return llmc::NullArgument("data");
  return llmc::Status::Ok();
}

}  // namespace

extern "C" {

llmc_status llmc_hand_over_create(llmc_engine* engine, const int32_t* token_ids, uint64_t num_tokens,
                                  llmc_hand_over** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (token_ids == nullptr && num_tokens > 0) return llmc::NullArgument("token_ids");
    if (out == nullptr) return llmc::NullArgument("out");
    LLMC_RETURN_IF_ERROR(engine->engine->CheckHandOver());
    std::vector<int32_t> tokens(token_ids, token_ids + num_tokens);
    *out = new llmc_hand_over{engine->engine.get(), {std::move(tokens), {}}, {}};
    return llmc::Status::Ok();
  });
}

void llmc_hand_over_destroy(llmc_hand_over* hand_over) { delete hand_over; }

llmc_status llmc_hand_over_count(llmc_hand_over* hand_over, uint64_t* num_blocks, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(CheckArguments(hand_over, nullptr, 0));
    if (num_blocks == nullptr) return llmc::NullArgument("num_blocks");
    *num_blocks = hand_over->engine->CountBlocks(hand_over->text);
    return llmc::Status::Ok();
  });
}

llmc_status llmc_hand_over_export(llmc_hand_over* hand_over, uint64_t first_block, void* out, uint64_t capacity,
                                  uint64_t* num_blocks, uint64_t* num_bytes, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(CheckArguments(hand_over, out, capacity));
    if (num_blocks == nullptr) return llmc::NullArgument("num_blocks");
    if (num_bytes == nullptr) return llmc::NullArgument("num_bytes");
    return hand_over->engine->ExportBlocks(&hand_over->text, first_block, static_cast<unsigned char*>(out), capacity,
                                           num_blocks, num_bytes);
  });
}

llmc_status llmc_hand_over_seal(const llmc_hand_over* hand_over, void* data, uint64_t num_bytes, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(CheckArguments(hand_over, data, num_bytes));
    return hand_over->engine->SealBlocks(data, num_bytes);
  });
}

llmc_status llmc_hand_over_check(const llmc_hand_over* hand_over, const void* data, uint64_t num_bytes,
                                 llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(CheckArguments(hand_over, data, num_bytes));
    return hand_over->engine->CheckBlocks(hand_over->text, data, num_bytes);
  });
}

llmc_status llmc_hand_over_import(llmc_hand_over* hand_over, const void* data, uint64_t num_bytes, uint64_t* num_blocks,
                                  llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(CheckArguments(hand_over, data, num_bytes));
    if (num_blocks == nullptr) return llmc::NullArgument("num_blocks");
    return hand_over->engine->ImportBlocks(&hand_over->text, data, num_bytes, num_blocks);
  });
}

}  // extern "C"
