// HandedBlocks: the bytes in which KV blocks go from one engine to another. Independent of engines and devices.
#pragma once
#include <cstdint>

#include "artifact/model_shape.h"
#include "core/status.h"

namespace llmc {

// A hand-over, little endian: a header, then num_blocks records, each with the tokens and the KV of one block.
//
//     header: u8 magic[8], u32 header_bytes, u32 block_size, u64 identity, u64 block_bytes, u32 first_block,
//             u32 num_blocks, i32 kv_dtype, u32 num_layers, u32 has_state, u32 reserved[2], u32 crc32
//     record: u32 crc32, u32 reserved, i32 tokens[block_size], u8 kv[block_bytes]
//     state:  u32 crc32, u32 reserved, u8 states[state_bytes]
//
// A checksum is that of all other bytes of its header, record or state. Block i has tokens [i * block_size, (i + 1) *
// block_size) of a text. With has_state, the states behind the last block's last token follow the records.
class HandedBlocks {
 public:
  static constexpr uint64_t kHeaderBytes = 64;
  static uint64_t RecordBytes(const ModelShape& model) {
    return 8 + static_cast<uint64_t>(model.block_size) * sizeof(int32_t) + model.kv_block_bytes;
  }
  static uint64_t StateRecordBytes(const ModelShape& model) { return 8 + model.state_bytes; }

  static void WriteHeader(const ModelShape& model, uint32_t first_block, uint32_t num_blocks, bool has_state,
                          unsigned char* out);
  // Begins a record; its KV goes to the place that is returned.
  static unsigned char* BeginRecord(const ModelShape& model, const int32_t* tokens, unsigned char* record);
  // The same for states.
  static unsigned char* BeginState(unsigned char* record);
  // Writes the checksums of all records, which take longer than copying them does.
  static Status Seal(const ModelShape& model, void* data, uint64_t bytes);

  // Checks header, sizes and tokens against the model and the text whose blocks they should be; Check does the rest.
  // Keeps `data`.
  static Status Read(const ModelShape& model, const int32_t* tokens, uint64_t num_tokens, const void* data,
                     uint64_t bytes, HandedBlocks* out);
  // Compares the checksums of all records.
  Status Check() const;

  uint32_t first_block() const { return first_block_; }
  uint32_t num_blocks() const { return num_blocks_; }
  // KV of block first_block() + index.
  const unsigned char* kv(uint32_t index) const { return record(index) + kv_offset_; }
  // States behind the last block; nullptr: there are none.
  const unsigned char* states() const { return state_record_bytes_ == 0 ? nullptr : record(num_blocks_) + 8; }

 private:
  const unsigned char* record(uint32_t index) const { return records_ + index * record_bytes_; }

  uint32_t first_block_ = 0, num_blocks_ = 0;
  uint64_t record_bytes_ = 0, kv_offset_ = 0, state_record_bytes_ = 0;
  const unsigned char* records_ = nullptr;
};

}  // namespace llmc
