// Which artifacts are the same, and what they must have in common to have the same KV blocks for the same tokens.
#include <string>

#include "artifact/artifact.h"

namespace llmc {
namespace {

// FNV-1a of a sequence of numbers and texts.
class Digest {
 public:
  void Add(uint64_t value) {
    for (int i = 0; i < 8; ++i) AddByte(static_cast<unsigned char>(value >> 8 * i));
  }
  void Add(const std::string& text) {
    Add(text.size());
    for (char c : text) AddByte(static_cast<unsigned char>(c));
  }
  uint64_t value() const { return value_; }

 private:
  void AddByte(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3ull; }
  uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace

// Graphs are left out: a token's KV does not depend on the bucket.
uint64_t Artifact::KvIdentity() const {
  Digest digest;
  digest.Add(llmc_version());
  for (const std::string* text : {&target_.kind, &target_.name, &target_.layout}) digest.Add(*text);
  for (int32_t fact : {model_.num_layers, model_.num_kv_heads, model_.head_dim, model_.block_size, model_.kv_dtype,
                       model_.vocab_size, model_.act_dtype, model_.sliding_window, model_.num_ranks}) {
    digest.Add(static_cast<uint64_t>(static_cast<uint32_t>(fact)));
  }
  digest.Add(model_.key_block_bytes);
  digest.Add(model_.value_block_bytes);
  for (const KvLayerRecord& layer : kv_layers_) {
    digest.Add(layer.key_block_bytes);
    digest.Add(layer.value_block_bytes);
  }
  for (const StateLayerRecord& one : state_layers_) digest.Add(one.layer);
  for (const WeightRecord& weight : weights_) {
    digest.Add(strings_.substr(weight.name_offset, weight.name_length));
    digest.Add(strings_.substr(weight.layout_offset, weight.layout_length));
    digest.Add(weight.dtype);
    digest.Add(weight.bytes);
    digest.Add(weight.crc32);
    for (int64_t size : weight.shape) digest.Add(static_cast<uint64_t>(size));
  }
  return digest.value();
}

uint64_t Artifact::Identity() const {
  Digest digest;
  digest.Add(shape_.kv_identity);
  digest.Add(tables_crc32_);
  return digest.value();
}

}  // namespace llmc
