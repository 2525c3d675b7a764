// Slots for the states of sequences of a recurrent model, whose numbers are those of device.h. Independent of devices and
// sequences.
#pragma once
#include <cstdint>
#include <vector>

#include "core/status.h"

namespace llmc {

// Slot 0 is the dummy slot: it is never given out.
//
// A slot is free, of a sequence, or of a KV block. That of a block has the state behind the block's last token, so that
// other texts can go on from there. It is promised while a step is to write it, then kept. Kept slots are given to
// whoever needs one, the least recently used first.
class StateSlots {
 public:
  // num_slots: with the dummy slot; 0: the model is not recurrent. num_blocks: with the dummy block.
  StateSlots(uint32_t num_slots, uint32_t num_blocks);

  bool any() const { return num_slots_ > 0; }
  uint32_t num_usable() const { return num_slots_ > 0 ? num_slots_ - 1 : 0; }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t num_kept() const { return num_kept_; }
  // Slots that Take and Promise can give.
  uint32_t num_available() const { return num_free() + num_kept_; }

  // A slot for a sequence, or 0 if none is available. Its contents are those of the kept slot that it was, if any.
  uint32_t Take();
  void GiveBack(uint32_t slot) { free_.push_back(slot); }

  // The slot that a step writes for this block, or 0 if none is available. Asked again, it is the same one.
  uint32_t Promise(uint32_t block);
  // The promised slot of a block was written. to: the block of the same contents that lookups find, maybe another one,
  // which has the slot from now on unless it has one.
  void Keep(uint32_t block, uint32_t to);
  // The kept slot of a block; 0: it has none.
  uint32_t of(uint32_t block) const { return any() && kept_[slots_[block]] ? slots_[block] : 0; }
  // The block's kept slot is used now.
  void Touch(uint32_t block);
  // The block has other contents from now on.
  void Drop(uint32_t block);

  void Clear() noexcept;

  // taken: slots of sequences.
  Status CheckIntegrity(const std::vector<uint32_t>& taken) const;

 private:
  uint32_t Available();
  void Unlist(uint32_t slot);
  void ListLast(uint32_t slot);

  uint32_t num_slots_, num_kept_ = 0;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> slots_;  // [block]: its slot, 0: none
  std::vector<uint32_t> blocks_;  // [slot]: its block, 0: none
  std::vector<bool> kept_;  // [slot]: else promised, where it has a block
  std::vector<uint32_t> next_, previous_;  // kept slots, least recently used first; slot 0 is both ends
};

}  // namespace llmc
