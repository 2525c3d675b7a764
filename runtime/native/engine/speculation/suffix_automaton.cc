#include "engine/speculation/suffix_automaton.h"

namespace llmc {
namespace {

constexpr uint32_t kFirstSlots = 64;

uint64_t MixEdge(uint32_t state, int32_t token) {
  uint64_t x = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
  x *= 0x9e3779b97f4a7c15ull;
  return x ^ x >> 29;
}

}  // namespace

uint64_t SuffixAutomaton::MostBytes(uint64_t tokens) {
  // n tokens make at most 2n states and 3n edges; vectors double, and slots are at most half full.
  return 2 * (2 * tokens * sizeof(State) + 3 * tokens * sizeof(Edge) + 2 * 3 * tokens * sizeof(uint32_t));
}

void SuffixAutomaton::Clear() {
  states_.assign(1, {0, kNone, 0, 0});
  edges_.assign(1, {});
  slots_.assign(kFirstSlots, 0);
  last_ = size_ = match_length_ = match_end_ = 0;
}

uint32_t SuffixAutomaton::Slot(uint32_t state, int32_t token) const {
  const uint32_t mask = static_cast<uint32_t>(slots_.size()) - 1;
  for (uint32_t slot = static_cast<uint32_t>(MixEdge(state, token)) & mask;; slot = (slot + 1) & mask) {
    const uint32_t edge = slots_[slot];
    if (edge == 0 || (edges_[edge].state == state && edges_[edge].token == token)) return slot;
  }
}

void SuffixAutomaton::Rehash() {
  slots_.assign(2 * slots_.size(), 0);
  for (uint32_t i = 1; i < edges_.size(); ++i) slots_[Slot(edges_[i].state, edges_[i].token)] = i;
}

void SuffixAutomaton::AddEdge(uint32_t state, int32_t token, uint32_t target) {
  if (2 * edges_.size() >= slots_.size()) Rehash();
  const uint32_t edge = static_cast<uint32_t>(edges_.size());
  edges_.push_back({state, token, target, states_[state].first_edge});
  states_[state].first_edge = edge;
  slots_[Slot(state, token)] = edge;
}

// Splits `child`: its substrings that are no longer than those of `parent` and the token end at more places from now
// on.
uint32_t SuffixAutomaton::Split(uint32_t parent, uint32_t child, int32_t token) {
  const uint32_t clone = static_cast<uint32_t>(states_.size());
  states_.push_back({states_[parent].length + 1, states_[child].link, states_[child].last_end, 0});
  for (uint32_t e = states_[child].first_edge; e != 0; e = edges_[e].next) {
    AddEdge(clone, edges_[e].token, edges_[e].target);
  }
  for (uint32_t at = parent; at != kNone; at = states_[at].link) {
    const uint32_t edge = Find(at, token);
    if (edge == 0 || edges_[edge].target != child) break;
    edges_[edge].target = clone;
  }
  states_[child].link = clone;
  return clone;
}

void SuffixAutomaton::Append(int32_t token) {
  const uint32_t whole = static_cast<uint32_t>(states_.size());
  states_.push_back({++size_, 0, size_, 0});
  uint32_t at = last_, edge = 0;
  for (; at != kNone; at = states_[at].link) {
    edge = Find(at, token);
    if (edge != 0) break;
    AddEdge(at, token, whole);
  }
  uint32_t link = 0;
  if (at != kNone) {
    link = edges_[edge].target;
    if (states_[link].length != states_[at].length + 1) link = Split(at, link, token);
  }
  states_[whole].link = link;
  last_ = whole;
  match_length_ = states_[link].length;
  match_end_ = states_[link].last_end;
  // All suffixes end here, too. A text of one repeated token has one per token: the shorter ones keep an older end.
  for (uint32_t climbed = 0; link != 0 && climbed < kMostClimbed; ++climbed, link = states_[link].link) {
    states_[link].last_end = size_;
  }
}

}  // namespace llmc
