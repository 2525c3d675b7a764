#include "engine/handed_blocks.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "core/crc32.h"

namespace llmc {
namespace {

constexpr char kMagic[8] = {'L', 'L', 'M', 'C', 'K', 'V', '0', '2'};

struct HandedHeader {
  char magic[8];
  uint32_t header_bytes, block_size;
  uint64_t identity, block_bytes;
  uint32_t first_block, num_blocks;
  int32_t kv_dtype;
  uint32_t num_layers, has_state, reserved[2], crc32;
};
static_assert(sizeof(HandedHeader) == HandedBlocks::kHeaderBytes, "the header has no gaps");

uint32_t HeaderCrc(const HandedHeader& header) { return Crc32(&header, offsetof(HandedHeader, crc32)); }

uint32_t RecordCrc(const unsigned char* record, uint64_t bytes) {
  return Crc32(record + sizeof(uint32_t), bytes - sizeof(uint32_t));
}

Status Damaged(const std::string& what) {
  return Status::Error(LLMC_ERR_CORRUPT, "The handed-over blocks are damaged: " + what + "; fetch them again.");
}

Status Differs(const char* what, uint64_t theirs, uint64_t ours) {
  return Status::Invalid(std::string("The handed-over blocks have ") + what + " " + std::to_string(theirs) +
                         " but this artifact has " + std::to_string(ours) + "; use the same artifact on both sides.");
}

Status CheckFormat(const ModelShape& model, const HandedHeader& h) {
  if (h.block_size != static_cast<uint32_t>(model.block_size)) {
    return Differs("block_size", h.block_size, static_cast<uint64_t>(model.block_size));
  }
  if (h.num_layers != static_cast<uint32_t>(model.num_layers)) {
    return Differs("num_layers", h.num_layers, static_cast<uint64_t>(model.num_layers));
  }
  if (h.kv_dtype != model.kv_dtype) {
    return Differs("kv_dtype", static_cast<uint32_t>(h.kv_dtype), static_cast<uint32_t>(model.kv_dtype));
  }
  if (h.block_bytes != model.kv_block_bytes) return Differs("block_bytes", h.block_bytes, model.kv_block_bytes);
  if (h.identity != model.kv_identity) {
    return Status::Invalid(
        "The handed-over blocks come from another artifact: model, weights, target or version of llmc differ; use the "
        "same on both sides.");
  }
  return Status::Ok();
}

// Checks all of a header, and that as many records follow.
Status ReadHeader(const ModelShape& model, const void* data, uint64_t bytes, HandedHeader* out) {
  HandedHeader& h = *out;
  if (bytes < sizeof(h)) return Damaged("there are " + std::to_string(bytes) + " bytes, fewer than a header has");
  std::memcpy(&h, data, sizeof(h));
  if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) != 0 || h.header_bytes != sizeof(h)) {
    return Status::Error(LLMC_ERR_VERSION,
                         "The handed-over blocks have an unknown format; use the same version of llmc on both sides.");
  }
  if (h.crc32 != HeaderCrc(h)) return Damaged("the checksum of the header is wrong");
  LLMC_RETURN_IF_ERROR(CheckFormat(model, h));
  const uint64_t record_bytes = HandedBlocks::RecordBytes(model);
  const uint64_t state_bytes = h.has_state != 0 ? HandedBlocks::StateRecordBytes(model) : 0;
  const uint64_t blocks_bytes = bytes - sizeof(h) - std::min(bytes - sizeof(h), state_bytes);
  if (h.has_state > 1 || bytes - sizeof(h) < state_bytes || blocks_bytes % record_bytes != 0 ||
      blocks_bytes / record_bytes != h.num_blocks) {
    return Damaged("there are " + std::to_string(bytes) + " bytes for " + std::to_string(h.num_blocks) + " blocks" +
                   (h.has_state != 0 ? " and states" : ""));
  }
  if (h.has_state != 0 && !model.recurrent()) return Damaged("there are states, which this model has none of");
  return Status::Ok();
}

}  // namespace

void HandedBlocks::WriteHeader(const ModelShape& model, uint32_t first_block, uint32_t num_blocks, bool has_state,
                               unsigned char* out) {
  HandedHeader h{};
  std::memcpy(h.magic, kMagic, sizeof(kMagic));
  h.header_bytes = sizeof(h);
  h.block_size = static_cast<uint32_t>(model.block_size);
  h.identity = model.kv_identity;
  h.block_bytes = model.kv_block_bytes;
  h.first_block = first_block;
  h.num_blocks = num_blocks;
  h.kv_dtype = model.kv_dtype;
  h.num_layers = static_cast<uint32_t>(model.num_layers);
  h.has_state = has_state ? 1 : 0;
  h.crc32 = HeaderCrc(h);
  std::memcpy(out, &h, sizeof(h));
}

unsigned char* HandedBlocks::BeginRecord(const ModelShape& model, const int32_t* tokens, unsigned char* record) {
  std::memset(record, 0, 8);
  std::memcpy(record + 8, tokens, static_cast<size_t>(model.block_size) * sizeof(int32_t));
  return record + (RecordBytes(model) - model.kv_block_bytes);
}

unsigned char* HandedBlocks::BeginState(unsigned char* record) {
  std::memset(record, 0, 8);
  return record + 8;
}

Status HandedBlocks::Seal(const ModelShape& model, void* data, uint64_t bytes) {
  HandedHeader h{};
  LLMC_RETURN_IF_ERROR(ReadHeader(model, data, bytes, &h));
  const uint64_t record_bytes = RecordBytes(model);
  unsigned char* record = static_cast<unsigned char*>(data) + sizeof(h);
  for (uint32_t i = 0; i < h.num_blocks; ++i, record += record_bytes) {
    const uint32_t crc = RecordCrc(record, record_bytes);
    std::memcpy(record, &crc, sizeof(crc));
  }
  if (h.has_state != 0) {
    const uint32_t crc = RecordCrc(record, StateRecordBytes(model));
    std::memcpy(record, &crc, sizeof(crc));
  }
  return Status::Ok();
}

Status HandedBlocks::Read(const ModelShape& model, const int32_t* tokens, uint64_t num_tokens, const void* data,
                          uint64_t bytes, HandedBlocks* out) {
  HandedHeader h{};
  LLMC_RETURN_IF_ERROR(ReadHeader(model, data, bytes, &h));
  const uint64_t block_size = h.block_size, end = uint64_t{h.first_block} + h.num_blocks;
  if (end > num_tokens / block_size) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "The handed-over blocks reach token " +
                                                    std::to_string(end * block_size) + " but the text has " +
                                                    std::to_string(num_tokens) + "; ask for blocks of this text.");
  }
  out->first_block_ = h.first_block;
  out->num_blocks_ = h.num_blocks;
  out->record_bytes_ = RecordBytes(model);
  out->kv_offset_ = out->record_bytes_ - model.kv_block_bytes;
  out->state_record_bytes_ = h.has_state != 0 ? StateRecordBytes(model) : 0;
  out->records_ = static_cast<const unsigned char*>(data) + sizeof(h);
  for (uint32_t i = 0; i < h.num_blocks; ++i) {
    const int32_t* wanted = tokens + (h.first_block + uint64_t{i}) * block_size;
    if (std::memcmp(out->record(i) + 8, wanted, block_size * sizeof(int32_t)) != 0) {
      return Status::Invalid("Block " + std::to_string(h.first_block + i) +
                             " of the handed-over blocks is of another text; ask for blocks of this text.");
    }
  }
  return Status::Ok();
}

Status HandedBlocks::Check() const {
  for (uint32_t i = 0; i < num_blocks_; ++i) {
    uint32_t crc = 0;
    std::memcpy(&crc, record(i), sizeof(crc));
    if (crc != RecordCrc(record(i), record_bytes_)) {
      return Damaged("the checksum of block " + std::to_string(first_block_ + i) + " is wrong");
    }
  }
  if (state_record_bytes_ > 0) {
    uint32_t crc = 0;
    std::memcpy(&crc, record(num_blocks_), sizeof(crc));
    if (crc != RecordCrc(record(num_blocks_), state_record_bytes_)) return Damaged("the checksum of states is wrong");
  }
  return Status::Ok();
}

}  // namespace llmc
