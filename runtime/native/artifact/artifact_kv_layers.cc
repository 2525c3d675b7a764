// Checks the layers of the KV cache, whose KV blocks may have sizes of their own, and which may have states instead.
#include <algorithm>
#include <cstddef>
#include <string>

#include "artifact/artifact.h"
#include "artifact/check_text.h"

namespace llmc {

bool Artifact::has_state(uint32_t layer) const {
  const auto before = [](const StateLayerRecord& one, uint32_t other) { return one.layer < other; };
  const auto at = std::lower_bound(state_layers_.begin(), state_layers_.end(), layer, before);
  return at != state_layers_.end() && at->layer == layer;
}

// Call after CheckModel.
Status Artifact::CheckStateLayers() const {
  uint32_t least = 0;
  for (const StateLayerRecord& one : state_layers_) {
    if (one.layer >= static_cast<uint32_t>(model_.num_layers)) {
      return Corrupt("graphs.bin",
                     "it says that layer " + Str(one.layer) + " of " + Str(model_.num_layers) + " has a state");
    }
    if (one.layer < least) {
      return Corrupt("graphs.bin", "layers with a state do not ascend at layer " + Str(one.layer));
    }
    least = one.layer + 1;
  }
  return Status::Ok();
}

// Call after CheckModel, CheckStages and CheckStateLayers.
Status Artifact::CheckKvLayers() {
  if (!kv_layers_.empty()) {
    if (kv_layers_.size() != uint64_t(model_.num_layers)) {
      return Corrupt("graphs.bin", "it says the KV blocks of " + Str(uint64_t{kv_layers_.size()}) + " layers of " +
                                       Str(model_.num_layers));
    }
    KvLayerRecord most{};
    for (std::size_t i = 0; i < kv_layers_.size(); ++i) {
      const KvLayerRecord& layer = kv_layers_[i];
      if (layer.key_block_bytes < 1) {
        return Corrupt("graphs.bin", "a KV block of layer " + Str(uint64_t{i}) + " has 0 bytes of keys");
      }
      most.key_block_bytes = std::max(most.key_block_bytes, layer.key_block_bytes);
      most.value_block_bytes = std::max(most.value_block_bytes, layer.value_block_bytes);
    }
    if (most.key_block_bytes != model_.key_block_bytes || most.value_block_bytes != model_.value_block_bytes) {
      return Corrupt("graphs.bin", "KV blocks of its layers have up to " + Str(most.key_block_bytes) +
                                       " bytes of keys and " + Str(most.value_block_bytes) +
                                       " of values, and the model's have " + Str(model_.key_block_bytes) + " and " +
                                       Str(model_.value_block_bytes));
    }
  }
  shape_.kv_block_bytes = LayerBytes(false);
  shape_.max_kv_blocks = MostEntries(false);
  shape_.state_bytes = LayerBytes(true);
  shape_.max_states = MostEntries(true);
  return Status::Ok();
}

// Bytes of a KV block of all layers with keys and values, or of a slot of all with a state; of the stage with the most.
// No sum overflows: CheckModel has multiplied the most bytes of a layer by the number of layers.
uint64_t Artifact::LayerBytes(bool states) const {
  uint64_t most = 0;
  for (uint32_t stage = 0; stage < num_stages(); ++stage) {
    const StageRecord layers = layers_of(stage);
    uint64_t bytes = 0;
    for (uint32_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
      if (has_state(layer) == states) bytes += key_block_bytes(layer) + value_block_bytes(layer);
    }
    most = std::max(most, bytes);
  }
  return most;
}

// Kernels count the elements of a pool in int32.
uint64_t Artifact::MostEntries(bool states) const {
  const uint64_t element_bytes = states ? sizeof(float) : DTypeBytes(model_.kv_dtype);
  uint64_t most = INT32_MAX;
  for (uint32_t layer = 0; layer < static_cast<uint32_t>(model_.num_layers); ++layer) {
    if (has_state(layer) != states) continue;
    for (const uint64_t bytes : {key_block_bytes(layer), value_block_bytes(layer)}) {
      most = std::min(most, INT32_MAX / std::max<uint64_t>(bytes / element_bytes, 1));
    }
  }
  return most;
}

}  // namespace llmc
