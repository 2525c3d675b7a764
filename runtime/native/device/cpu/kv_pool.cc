#include "device/cpu/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmc {
namespace {

constexpr uint64_t kMaxBytes = 1ull << 62;  // of a pool

}  // namespace

Status KvPool::Allocate(const Artifact& artifact, uint32_t stage, uint32_t num_blocks, KvPool* out) {
  const StageRecord layers = artifact.layers_of(stage);
  KvPool pool;
  pool.num_blocks_ = num_blocks;
  pool.first_layer_ = layers.first_layer;
  uint64_t end = 0;
  for (uint32_t i = 0; i < layers.num_layers; ++i) {
    const KvLayerRecord layer = artifact.kv_layer(layers.first_layer + i);
    for (const uint64_t block_bytes : {layer.key_block_bytes, layer.value_block_bytes}) {
      uint64_t bytes = 0;
      pool.parts_.push_back({end, block_bytes});
      if (__builtin_mul_overflow(block_bytes, uint64_t{num_blocks}, &bytes) || bytes > kMaxBytes - end) {
        return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "a KV pool of " + std::to_string(num_blocks) +
                                                         " blocks overflows 64 bits; ask for fewer blocks");
      }
      end += RoundUp(bytes, kAlignment);
    }
  }
  LLMC_RETURN_IF_ERROR(Pages::Allocate(end, "KV pool", &pool.pages_));
  *out = std::move(pool);
  return Status::Ok();
}

void KvPool::Touch(uint64_t num_blocks) {
  for (const Part& part : parts_) {
    TouchPages(pages_.data() + part.Block(touched_blocks_), pages_.data() + part.Block(num_blocks));
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
  for (const Part& part : parts_) {
    std::memcpy(pages_.data() + part.Block(to), pages_.data() + part.Block(from), part.block_bytes);
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
  for (const Part& part : parts_) {
    std::memcpy(out, pages_.data() + part.Block(block), part.block_bytes);
    out += part.block_bytes;
  }
  return Status::Ok();
}

Status KvPool::Write(uint32_t block, const unsigned char* from) {
  LLMC_RETURN_IF_ERROR(CheckBlock(block));
  for (const Part& part : parts_) {
    std::memcpy(pages_.data() + part.Block(block), from, part.block_bytes);
    from += part.block_bytes;
  }
  return Status::Ok();
}

}  // namespace llmc
