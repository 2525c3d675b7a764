// KvPool: keys and values of all layers of a stage; each layer's keys precede its values, block by block.
#pragma once
#include <cstdint>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"

namespace llmc {

class KvPool {
 public:
  KvPool() = default;
  // num_blocks: including the dummy block. stage: whose layers the pool is for.
  static Status Allocate(const Artifact& artifact, uint32_t stage, uint32_t num_blocks, KvPool* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const Pages& pages() const { return pages_; }
  // Block 0 of a layer of the stage.
  char* keys(uint32_t layer) const { return pages_.data() + (layer - first_layer_) * layer_bytes_; }
  char* values(uint32_t layer) const { return keys(layer) + key_bytes_; }

  // Allocates the pages of the first num_blocks blocks of every layer; their contents stay.
  void Touch(uint64_t num_blocks);
  // Copies a block of every layer.
  Status Copy(uint32_t from, uint32_t to);
  // Copy a block of every layer out and in: layer after layer, K before V.
  Status Read(uint32_t block, unsigned char* out) const;
  Status Write(uint32_t block, const unsigned char* from);

 private:
  Status CheckBlock(uint32_t block) const;

  Pages pages_;
  uint32_t num_blocks_ = 0, first_layer_ = 0, num_layers_ = 0;
  uint64_t key_block_bytes_ = 0, value_block_bytes_ = 0;  // of one layer
  uint64_t key_bytes_ = 0, layer_bytes_ = 0;              // K of one layer; K and V of one layer
  uint64_t touched_blocks_ = 0;
};

}  // namespace llmc
