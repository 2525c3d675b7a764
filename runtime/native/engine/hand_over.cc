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

uint32_t Engine::MostBlocks(const HandedText& text) const {
  return static_cast<uint32_t>(std::min<uint64_t>(text.tokens.size() / blocks_.block_size(), blocks_.num_usable()));
}

uint64_t Engine::CountBlocks(const HandedText& text) const {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  std::vector<uint32_t> found;
  uint64_t id = BlockManager::kRoot;
  blocks_.Lookup(BlockManager::kRoot, text.tokens.data(), MostBlocks(text), &found, &id);
  blocks_.CutToState(BlockManager::kRoot, &found, &id);
  return found.size();
}

// Finds at most `most` cached blocks from first_block on. *id: of the last one. Looks from the root on only where the
// place behind the last part leads nowhere: the work of all parts would grow with the square of the text otherwise.
bool Engine::FindNext(HandedText* text, uint64_t first_block, uint32_t most, std::vector<uint32_t>* found,
                      uint64_t* id) {
  const uint32_t end = MostBlocks(*text);
  if (first_block >= end) return false;
  const auto first = static_cast<uint32_t>(first_block);
  const int32_t* tokens = text->tokens.data();
  found->clear();
  for (bool fresh = false;; fresh = true) {
    if (text->place.num_blocks == first) {
      blocks_.Lookup(text->place.id, tokens + size_t{first} * blocks_.block_size(), std::min(most, end - first), found,
                     id);
    }
    // Blocks that were computed again after an eviction have other ids.
    if (!found->empty() || fresh || (text->place.num_blocks == first && blocks_.Stands(text->place))) break;
    text->place = blocks_.Touch(tokens, first);
  }
  return !found->empty();
}

Status Engine::ExportBlocks(HandedText* text, uint64_t first_block, unsigned char* out, uint64_t capacity,
                            uint64_t* num_blocks, uint64_t* bytes) {
  const uint64_t record = HandedBlocks::RecordBytes(model_);
  const uint64_t beside =
      HandedBlocks::kHeaderBytes + (model_.recurrent() ? HandedBlocks::StateRecordBytes(model_) : 0);
  if (capacity < beside + record) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) +
                                                    " but a hand-over of one block takes " +
                                                    std::to_string(beside + record) + " bytes.");
  }
  const auto most = static_cast<uint32_t>(std::min<uint64_t>((capacity - beside) / record, UINT32_MAX));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  std::vector<uint32_t> found;
  uint64_t id = BlockManager::kRoot;
  *num_blocks = *bytes = 0;
  if (!FindNext(text, first_block, most, &found, &id)) return Status::Ok();
  // A step in flight ends only where there is something to copy. It may register other blocks, and evict those found.
  LLMC_RETURN_IF_ERROR(Land());
  if (!FindNext(text, first_block, most, &found, &id)) return Status::Ok();
  const auto first = static_cast<uint32_t>(first_block);
  // Only the last part needs states: a request goes on behind its last block.
  const bool last = first + found.size() == MostBlocks(*text);
  if (last) blocks_.CutToState(text->place.id, &found, &id);
  if (found.empty()) return Status::Ok();
  const auto count = static_cast<uint32_t>(found.size());
  const uint32_t state = last ? blocks_.states().of(found.back()) : 0;
  HandedBlocks::WriteHeader(model_, first, count, state != 0, out);
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t* tokens = text->tokens.data() + size_t{first + i} * blocks_.block_size();
    unsigned char* kv = HandedBlocks::BeginRecord(model_, tokens, out + HandedBlocks::kHeaderBytes + i * record);
    LLMC_RETURN_IF_ERROR(device_->ReadBlock(found[i], kv));
  }
  uint64_t written = HandedBlocks::kHeaderBytes + count * record;
  if (state != 0) {
    LLMC_RETURN_IF_ERROR(device_->ReadState(state, HandedBlocks::BeginState(out + written)));
    written += HandedBlocks::StateRecordBytes(model_);
  }
  text->place.num_blocks = first + count;
  text->place.id = id;
  if (first + count == MostBlocks(*text)) text->place = blocks_.Touch(text->tokens.data(), first + count);
  *num_blocks = count;
  *bytes = written;
  return Status::Ok();
}

// Keeps states behind a block, where it has none and a slot is available.
Status Engine::ImportStates(uint32_t block, uint64_t parent, const int32_t* tokens, const unsigned char* states) {
  if (blocks_.states().of(block) != 0) return Status::Ok();
  // Copies that a fork waits for may read the slot that this takes.
  for (const StepPlan::Copy& copy : scheduler_.TakeStateCopies()) {
    LLMC_RETURN_IF_ERROR(device_->CopyState(copy.from, copy.to));
  }
  const uint32_t slot = blocks_.states().Promise(block);
  if (slot == 0) return Status::Ok();
  const Status written = device_->WriteState(slot, states);
  if (written.ok()) {
    blocks_.Register(block, parent, tokens, /*with_state=*/true);
  } else {
    blocks_.states().Drop(block);
  }
  return written;
}

Status Engine::CheckBlocks(const HandedText& text, const void* data, uint64_t bytes) const {
  HandedBlocks given;
  LLMC_RETURN_IF_ERROR(HandedBlocks::Read(model_, text.tokens.data(), text.tokens.size(), data, bytes, &given));
  return given.Check();
}

Status Engine::ImportBlocks(HandedText* text, const void* data, uint64_t bytes, uint64_t* num_blocks) {
  const int32_t* tokens = text->tokens.data();
  HandedBlocks given;
  LLMC_RETURN_IF_ERROR(HandedBlocks::Read(model_, tokens, text->tokens.size(), data, bytes, &given));
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(Land());
  const uint32_t first = given.first_block();
  BlockManager::Place& place = text->place;
  if (place.num_blocks != first || !blocks_.Stands(place)) {
    place = blocks_.Touch(tokens, std::min(first, blocks_.num_usable()));
  }
  {
    std::vector<uint32_t> found;
    Held held(&blocks_);
    held.Reserve(given.num_blocks());
    for (uint32_t i = 0; place.num_blocks == uint64_t{first} + i && i < given.num_blocks(); ++i) {
      const int32_t* own = tokens + size_t{place.num_blocks} * blocks_.block_size();
      const uint64_t parent = place.id;
      uint64_t id = parent;
      uint32_t block = 0;
      blocks_.Lookup(parent, own, 1, &found, &id);
      if (!found.empty()) {
        block = found[0];
        held.Acquire(block);
      } else {
        // Blocks of other texts only are evicted. If that is not sure, the text's own become the last to go.
        if (!blocks_.Stands(place, 1)) place = blocks_.Touch(tokens, first + i);
        if (place.num_blocks != first + i || !blocks_.Stands(place, 1)) break;
        block = blocks_.Allocate();
        held.Take(block);
        LLMC_RETURN_IF_ERROR(device_->WriteBlock(block, given.kv(i)));
        id = blocks_.Register(block, place.id, own);
      }
      place.id = id;
      ++place.num_blocks;
      if (i + 1 == given.num_blocks() && given.states() != nullptr) {
        LLMC_RETURN_IF_ERROR(ImportStates(block, parent, own, given.states()));
      }
    }
  }
  // Parts came one after the other; of the whole text, the end is to be evicted first.
  if (place.num_blocks == MostBlocks(*text)) place = blocks_.Touch(tokens, place.num_blocks);
  *num_blocks = place.num_blocks;
  return Status::Ok();
}

}  // namespace llmc
