// KvPool: keys and values of all layers of a stage; each layer's keys precede its values, block by block.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "core/status.h"

namespace llmc {

class KvPool {
 public:
  KvPool() = default;
  // num_blocks: including the dummy block. stage: whose layers the pool is for. A failure leaves *out as it was.
  static Status Allocate(const Artifact& artifact, uint32_t stage, uint32_t num_blocks, KvPool* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const Pages& pages() const { return pages_; }
  // Block 0 of a layer of the stage.
  char* keys(uint32_t layer) const { return pages_.data() + parts_[2 * (layer - first_layer_)].at; }
  char* values(uint32_t layer) const { return pages_.data() + parts_[2 * (layer - first_layer_) + 1].at; }

  // Allocates the pages of the first num_blocks blocks of every layer; their contents stay.
  void Touch(uint64_t num_blocks);
  // Copies a block of every layer.
  Status Copy(uint32_t from, uint32_t to);
  // Copy a block of every layer out and in: layer after layer, K before V.
  Status Read(uint32_t block, unsigned char* out) const;
  Status Write(uint32_t block, const unsigned char* from);

 private:
  // Keys or values of a layer, in bytes. at: where block 0 begins.
  struct Part {
    uint64_t at, block_bytes;
    uint64_t Block(uint64_t block) const { return at + block * block_bytes; }
  };

  Status CheckBlock(uint32_t block) const;

  Pages pages_;
  uint32_t num_blocks_ = 0, first_layer_ = 0;
  std::vector<Part> parts_;  // layer after layer, K before V
  uint64_t touched_blocks_ = 0;
};

}  // namespace llmc
