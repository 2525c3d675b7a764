// Engine, continued: cached KV blocks that go to, or come from, another engine.
#include <algorithm>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/handed_blocks.h"

namespace llmc {
namespace {

// References to blocks, which keep them from being reused. Dropped last to first, so that the front is kept longest.
class Held {
 public:
  explicit Held(BlockManager* blocks) : blocks_(blocks) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    for (std::size_t i = all_.size(); i-- > 0;) blocks_->Release(all_[i]);
  }
  // All memory that later calls need.
  void Reserve(std::size_t count) { all_.reserve(count); }
  void Acquire(uint32_t block) {
    blocks_->Acquire(block);
    all_.push_back(block);
  }
  // Takes over a reference.
  void Take(uint32_t block) { all_.push_back(block); }

 private:
  BlockManager* blocks_;
  std::vector<uint32_t> all_;
};

}  // namespace

Status Engine::CheckHandOver() const {
  if (blocks_.prefix_cache()) return Status::Ok();
  return Status::Invalid(model_.whole_prompts
                             ? "This model computes whole texts and caches no blocks; there is nothing to hand over."
                             : "Blocks are handed over from one prefix cache to another; create the engine with one.");
}

Status Engine::ExportBlocks(const int32_t* tokens, uint64_t num_tokens, uint64_t first_block, unsigned char* out,
                            uint64_t capacity, uint64_t* num_blocks, uint64_t* bytes) {
  LLMC_RETURN_IF_ERROR(CheckHandOver());
  const uint64_t record = HandedBlocks::RecordBytes(model_);
  if (capacity != 0 && capacity < HandedBlocks::kHeaderBytes + record) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) +
                                                    " but a hand-over of one block takes " +
                                                    std::to_string(HandedBlocks::kHeaderBytes + record) + " bytes.");
  }
  const uint32_t most =
      static_cast<uint32_t>(std::min<uint64_t>(num_tokens / blocks_.block_size(), blocks_.num_usable()));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  if (capacity != 0) LLMC_RETURN_IF_ERROR(Land());
  std::vector<uint32_t> found;
  uint64_t id = BlockManager::kRoot;
  blocks_.Lookup(BlockManager::kRoot, tokens, most, &found, &id);
  uint64_t count = found.size() > first_block ? found.size() - first_block : 0;
  if (capacity != 0) count = std::min(count, (capacity - HandedBlocks::kHeaderBytes) / record);
  if (count != 0 && capacity != 0) {
    Held held(&blocks_);
    held.Reserve(found.size());
    for (uint32_t block : found) held.Acquire(block);
    HandedBlocks::WriteHeader(model_, static_cast<uint32_t>(first_block), static_cast<uint32_t>(count), out);
    for (uint64_t i = 0; i < count; ++i) {
      unsigned char* at = out + HandedBlocks::kHeaderBytes + i * record;
      LLMC_RETURN_IF_ERROR(device_->ReadBlock(found[first_block + i], HandedBlocks::KvOf(model_, at)));
      HandedBlocks::Seal(model_, tokens + (first_block + i) * blocks_.block_size(), at);
    }
  }
  *num_blocks = count;
  *bytes = count == 0 ? 0 : HandedBlocks::kHeaderBytes + count * record;
  return Status::Ok();
}

Status Engine::ImportBlocks(const int32_t* tokens, uint64_t num_tokens, const void* data, uint64_t bytes,
                            uint64_t* num_blocks) {
  LLMC_RETURN_IF_ERROR(CheckHandOver());
  HandedBlocks given;
  LLMC_RETURN_IF_ERROR(HandedBlocks::Read(model_, tokens, num_tokens, data, bytes, &given));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  std::vector<uint32_t> found;
  uint64_t parent = BlockManager::kRoot;
  const uint32_t before = std::min(given.first_block(), blocks_.num_usable());
  blocks_.Lookup(BlockManager::kRoot, tokens, before, &found, &parent);
  uint64_t count = found.size();
  Held held(&blocks_);
  held.Reserve(count + given.num_blocks());
  for (uint32_t block : found) held.Acquire(block);
  for (uint32_t i = 0; count == uint64_t{given.first_block()} + i && i < given.num_blocks(); ++i, ++count) {
    const int32_t* text = tokens + count * blocks_.block_size();
    uint64_t id = parent;
    blocks_.Lookup(parent, text, 1, &found, &id);
    if (!found.empty()) {
      held.Acquire(found[0]);
    } else {
      // What the chain holds is referenced, so this evicts other texts only.
      const uint32_t block = blocks_.Allocate();
      if (block == 0) break;
      held.Take(block);
      LLMC_RETURN_IF_ERROR(device_->WriteBlock(block, given.kv(i)));
      id = blocks_.Register(block, parent, text);
    }
    parent = id;
  }
  *num_blocks = count;
  return Status::Ok();
}

}  // namespace llmc
