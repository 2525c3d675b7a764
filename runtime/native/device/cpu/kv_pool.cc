#include "device/cpu/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmc {
namespace {

constexpr uint64_t kMaxBytes = 1ull << 62;  // of a pool

}  // namespace

Status KvPool::Allocate(const Artifact& artifact, uint32_t stage, const PoolCounts& counts, KvPool* out) {
  const StageRecord layers = artifact.layers_of(stage);
  KvPool pool;
  pool.counts_ = counts;
  pool.first_layer_ = layers.first_layer;
  uint64_t end = 0;
  for (uint32_t layer = layers.first_layer; layer < layers.first_layer + layers.num_layers; ++layer) {
    const PoolKind kind = PoolKindOf(artifact, layer);
    for (const uint64_t entry_bytes : {artifact.key_block_bytes(layer), artifact.value_block_bytes(layer)}) {
      uint64_t bytes = 0;
      const Part part = {end, entry_bytes};
      pool.parts_.push_back(part);
      if (entry_bytes != 0) pool.kind_parts_[static_cast<uint32_t>(kind)].push_back(part);
      if (__builtin_mul_overflow(entry_bytes, uint64_t{counts[kind]}, &bytes) || bytes > kMaxBytes - end) {
        return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "a KV pool of " + std::to_string(counts[kind]) +
                                                         TextOf(kind, " blocks", " slots of states") +
                                                         " overflows 64 bits; ask for fewer");
      }
      end += RoundUp(bytes, kAlignment);
    }
  }
  Status taken = Pages::Allocate(end, "KV pool", &pool.pages_);
  if (!taken.ok() && counts.states != 0) taken.message += " or num_states";
  LLMC_RETURN_IF_ERROR(taken);
  *out = std::move(pool);
  return Status::Ok();
}

void KvPool::Touch(PoolKind kind, uint64_t count) {
  for (const Part& part : parts_of(kind)) {
    TouchPages(pages_.data() + part.Entry(touched_[kind]), pages_.data() + part.Entry(count));
  }
  touched_[kind] = std::max(touched_[kind], count);
}

void KvPool::CopyPart(PoolKind kind, uint32_t part, uint32_t from, uint32_t to) {
  const Part& of = parts_of(kind)[part];
  std::memcpy(pages_.data() + of.Entry(to), pages_.data() + of.Entry(from), of.entry_bytes);
}

Status KvPool::Read(PoolKind kind, uint32_t entry, unsigned char* out) const {
  LLMC_RETURN_IF_ERROR(CheckEntry(kind, entry, counts_[kind]));
  for (const Part& part : parts_of(kind)) {
    std::memcpy(out, pages_.data() + part.Entry(entry), part.entry_bytes);
    out += part.entry_bytes;
  }
  return Status::Ok();
}

Status KvPool::Write(PoolKind kind, uint32_t entry, const unsigned char* from) {
  LLMC_RETURN_IF_ERROR(CheckEntry(kind, entry, counts_[kind]));
  for (const Part& part : parts_of(kind)) {
    std::memcpy(pages_.data() + part.Entry(entry), from, part.entry_bytes);
    from += part.entry_bytes;
  }
  return Status::Ok();
}

}  // namespace llmc
