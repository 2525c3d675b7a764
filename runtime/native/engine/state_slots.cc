#include "engine/state_slots.h"

#include <string>

namespace llmc {

StateSlots::StateSlots(uint32_t num_slots, uint32_t num_blocks)
    : num_slots_(num_slots),
      slots_(num_slots > 0 ? num_blocks : 0),
      blocks_(num_slots),
      kept_(num_slots),
      next_(num_slots),
      previous_(num_slots) {
  free_.reserve(num_slots);
  Clear();
}

void StateSlots::Clear() noexcept {
  free_.clear();
  num_kept_ = 0;
  slots_.assign(slots_.size(), 0);
  for (std::vector<uint32_t>* of : {&blocks_, &next_, &previous_}) of->assign(of->size(), 0);
  kept_.assign(kept_.size(), false);
  for (uint32_t slot = num_slots_; slot-- > 1;) free_.push_back(slot);
}

void StateSlots::Unlist(uint32_t slot) {
  next_[previous_[slot]] = next_[slot];
  previous_[next_[slot]] = previous_[slot];
  kept_[slot] = false;
  --num_kept_;
}

void StateSlots::ListLast(uint32_t slot) {
  const uint32_t last = previous_[0];
  next_[last] = previous_[0] = slot;
  previous_[slot] = last;
  next_[slot] = 0;
  kept_[slot] = true;
  ++num_kept_;
}

uint32_t StateSlots::Available() {
  if (!free_.empty()) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (num_kept_ == 0) return 0;
  const uint32_t slot = next_[0];
  Unlist(slot);
  slots_[blocks_[slot]] = 0;
  blocks_[slot] = 0;
  return slot;
}

uint32_t StateSlots::Take() { return Available(); }

uint32_t StateSlots::Promise(uint32_t block) {
  if (slots_[block] != 0) return slots_[block];
  const uint32_t slot = Available();
  if (slot == 0) return 0;
  slots_[block] = slot;
  blocks_[slot] = block;
  return slot;
}

void StateSlots::Keep(uint32_t block, uint32_t to) {
  if (!any() || slots_[block] == 0 || kept_[slots_[block]]) return;
  const uint32_t slot = slots_[block];
  if (to != block) {
    if (slots_[to] != 0) return Drop(block);
    slots_[block] = 0;
    slots_[to] = slot;
    blocks_[slot] = to;
  }
  ListLast(slot);
}

void StateSlots::Touch(uint32_t block) {
  const uint32_t slot = of(block);
  if (slot == 0) return;
  Unlist(slot);
  ListLast(slot);
}

void StateSlots::Drop(uint32_t block) {
  if (!any() || slots_[block] == 0) return;
  const uint32_t slot = slots_[block];
  if (kept_[slot]) Unlist(slot);
  slots_[block] = blocks_[slot] = 0;
  free_.push_back(slot);
}

Status StateSlots::CheckIntegrity(const std::vector<uint32_t>& taken) const {
  const auto broken = [](const char* what, uint32_t slot) {
    return Status::Error(LLMC_ERR_INTERNAL, "Slot " + std::to_string(slot) + " of states " + what + ".");
  };
  std::vector<bool> seen(num_slots_);
  uint32_t num_seen = 0;
  const auto see = [&](uint32_t slot) {
    if (slot == 0 || slot >= num_slots_ || seen[slot]) return false;
    ++num_seen;
    return static_cast<bool>(seen[slot] = true);
  };
  for (const uint32_t slot : taken) {
    if (!see(slot)) return broken("is of two sequences, or does not exist", slot);
  }
  for (const uint32_t slot : free_) {
    if (!see(slot)) return broken("is free and in use", slot);
  }
  uint32_t kept = 0;
  for (uint32_t block = 0; block < slots_.size(); ++block) {
    const uint32_t slot = slots_[block];
    if (slot == 0) continue;
    if (!see(slot) || blocks_[slot] != block) return broken("is of two blocks, or of a block and a sequence", slot);
    kept += kept_[slot];
  }
  if (num_seen != num_usable()) return broken("is lost, or another one", num_seen);
  uint32_t listed = 0;
  for (uint32_t slot = num_slots_ > 0 ? next_[0] : 0; slot != 0; slot = next_[slot]) {
    if (!kept_[slot] || previous_[next_[slot]] != slot || ++listed > kept) return broken("is listed wrongly", slot);
  }
  return listed == kept && kept == num_kept_ ? Status::Ok() : broken("is kept and not listed, or another one", kept);
}

}  // namespace llmc
