#include "device/cpu/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace llmc {

Status KvPool::Allocate(const Artifact& artifact, uint32_t stage, uint32_t num_blocks, KvPool* out) {
  uint64_t key_bytes = 0, value_bytes = 0, bytes = 0;
  if (__builtin_mul_overflow(artifact.key_block_bytes(), uint64_t{num_blocks}, &key_bytes) ||
      __builtin_mul_overflow(artifact.value_block_bytes(), uint64_t{num_blocks}, &value_bytes) ||
      key_bytes > (1ull << 60) || value_bytes > (1ull << 60)) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "a KV pool of " + std::to_string(num_blocks) +
                                                     " blocks overflows 64 bits; ask for fewer blocks");
  }
  out->num_blocks_ = num_blocks;
  out->first_layer_ = artifact.layers_of(stage).first_layer;
  out->num_layers_ = artifact.layers_of(stage).num_layers;
  out->key_block_bytes_ = artifact.key_block_bytes();
  out->value_block_bytes_ = artifact.value_block_bytes();
  out->key_bytes_ = RoundUp(key_bytes, kAlignment);
  out->layer_bytes_ = out->key_bytes_ + RoundUp(value_bytes, kAlignment);
  if (__builtin_mul_overflow(out->layer_bytes_, uint64_t{out->num_layers_}, &bytes)) bytes = UINT64_MAX;
  return Pages::Allocate(bytes, "KV pool", &out->pages_);
}

void KvPool::Touch(uint64_t num_blocks) {
  for (uint32_t layer = first_layer_; layer < first_layer_ + num_layers_; ++layer) {
    TouchPages(keys(layer) + touched_blocks_ * key_block_bytes_, keys(layer) + num_blocks * key_block_bytes_);
    TouchPages(values(layer) + touched_blocks_ * value_block_bytes_, values(layer) + num_blocks * value_block_bytes_);
  }
  touched_blocks_ = std::max(touched_blocks_, num_blocks);
}

Status KvPool::Copy(uint32_t from, uint32_t to) {
  if (from >= num_blocks_ || to >= num_blocks_) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "cannot copy KV block " + std::to_string(from) + " to " +
                                                    std::to_string(to) + "; the pool has " +
                                                    std::to_string(num_blocks_) + " blocks");
  }
  if (from == to) return Status::Ok();
  for (uint32_t layer = first_layer_; layer < first_layer_ + num_layers_; ++layer) {
    std::memcpy(keys(layer) + to * key_block_bytes_, keys(layer) + from * key_block_bytes_, key_block_bytes_);
    std::memcpy(values(layer) + to * value_block_bytes_, values(layer) + from * value_block_bytes_, value_block_bytes_);
  }
  return Status::Ok();
}

Status KvPool::CheckBlock(uint32_t block) const {
  if (block < num_blocks_) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, "KV block " + std::to_string(block) + " does not exist; the pool has " +
                                                  std::to_string(num_blocks_) + " blocks");
}

Status KvPool::Read(uint32_t block, unsigned char* out) const {
  LLMC_RETURN_IF_ERROR(CheckBlock(block));
  for (uint32_t layer = first_layer_; layer < first_layer_ + num_layers_; ++layer) {
    std::memcpy(out, keys(layer) + block * key_block_bytes_, key_block_bytes_);
    out += key_block_bytes_;
    std::memcpy(out, values(layer) + block * value_block_bytes_, value_block_bytes_);
    out += value_block_bytes_;
  }
  return Status::Ok();
}

Status KvPool::Write(uint32_t block, const unsigned char* from) {
  LLMC_RETURN_IF_ERROR(CheckBlock(block));
  for (uint32_t layer = first_layer_; layer < first_layer_ + num_layers_; ++layer) {
    std::memcpy(keys(layer) + block * key_block_bytes_, from, key_block_bytes_);
    from += key_block_bytes_;
    std::memcpy(values(layer) + block * value_block_bytes_, from, value_block_bytes_);
    from += value_block_bytes_;
  }
  return Status::Ok();
}

}  // namespace llmc
