// Checks that an artifact is another one with graphs added, so that an engine may go on with it.
#include <algorithm>
#include <cstring>

#include "artifact/artifact.h"

namespace llmc {
namespace {

template <typename T>
bool BeginsWith(const std::vector<T>& longer, const std::vector<T>& shorter) {
  return longer.size() >= shorter.size() &&
         (shorter.empty() || std::memcmp(longer.data(), shorter.data(), shorter.size() * sizeof(T)) == 0);
}

// Compares all but names, which are compared elsewhere: their offsets in the strings may differ.
bool SameTensor(const WeightRecord& a, const WeightRecord& b) {
  return a.dtype == b.dtype && a.rank == b.rank && a.file_offset == b.file_offset && a.bytes == b.bytes &&
         a.crc32 == b.crc32 && std::equal(a.shape, a.shape + 4, b.shape);
}

bool SameKernel(const KernelRecord& a, const KernelRecord& b) {
  return a.symbol_length == b.symbol_length && a.num_buffers == b.num_buffers && a.family == b.family &&
         a.code == b.code && std::equal(a.launch, a.launch + kMaxLaunchFacts, b.launch);
}

}  // namespace

Status Artifact::CheckExtends(const Artifact& older) const {
  const auto differ = [this](const char* what) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, directory_ + " has other " + what +
                                                        " than the engine's artifact; add buckets to that one by "
                                                        "llmc compile --add.");
  };
  const auto same_symbol = [&](const KernelRecord& a, const KernelRecord& b) {
    return SameKernel(a, b) &&
           strings_.compare(a.symbol_offset, a.symbol_length, older.strings_, b.symbol_offset, b.symbol_length) == 0;
  };
  if (std::memcmp(&model_, &older.model_, sizeof(model_)) != 0 || target_.kind != older.target_.kind ||
      target_.name != older.target_.name || target_.level != older.target_.level ||
      target_.layout != older.target_.layout) {
    return differ("model");
  }
  if (weights_header_crc32_ != older.weights_header_crc32_ || weights_.size() != older.weights_.size() ||
      !std::equal(weights_.begin(), weights_.end(), older.weights_.begin(), SameTensor)) {
    return differ("weights");
  }
  if (adapters_.size() != older.adapters_.size() || !BeginsWith(adapters_, older.adapters_)) {
    return differ("pools of adapters");
  }
  if (stages_.size() != older.stages_.size() || !BeginsWith(stages_, older.stages_)) return differ("stages");
  if (kv_layers_.size() != older.kv_layers_.size() || !BeginsWith(kv_layers_, older.kv_layers_)) {
    return differ("layers of the KV cache");
  }
  if (state_layers_.size() != older.state_layers_.size() || !BeginsWith(state_layers_, older.state_layers_)) {
    return differ("layers with a state");
  }
  if (collectives_.size() < older.collectives_.size() || !BeginsWith(collectives_, older.collectives_)) {
    return differ("collectives");
  }
  if (kernels_.size() < older.kernels_.size() ||
      !std::equal(older.kernels_.begin(), older.kernels_.end(), kernels_.begin(),
                  [&](const KernelRecord& b, const KernelRecord& a) { return same_symbol(a, b); })) {
    return differ("kernels");
  }
  if (!BeginsWith(graphs_, older.graphs_) || !BeginsWith(commands_, older.commands_) ||
      !BeginsWith(operands_, older.operands_)) {
    return differ("graphs");
  }
  return Status::Ok();
}

}  // namespace llmc
