// SuffixAutomaton: all substrings of a text that grows token by token, and an earlier occurrence of its longest
// repeated suffix. A token takes amortized constant time, and memory is linear in the text.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

class SuffixAutomaton {
 public:
  SuffixAutomaton() { Clear(); }

  void Clear();
  void Append(int32_t token);

  // Tokens so far.
  uint32_t size() const { return size_; }
  // Length of the longest suffix that also occurs earlier; 0: the last token is new.
  uint32_t match_length() const { return match_length_; }
  // End of that earlier occurrence: the text continues there at this index. Of several occurrences a late one; the last
  // one if fewer than kMostClimbed other suffixes also repeat.
  uint32_t match_end() const { return match_end_; }
  // Upper bound of the bytes for a text of `tokens` tokens.
  static uint64_t MostBytes(uint64_t tokens);

 private:
  // A set of substrings with the same end positions; the longest of them has `length` tokens.
  struct State {
    uint32_t length, link;
    uint32_t last_end;    // a late end position
    uint32_t first_edge;  // 0: none
  };
  struct Edge {
    uint32_t state;
    int32_t token;
    uint32_t target;
    uint32_t next;  // next edge of the same state; 0: none
  };
  static constexpr uint32_t kNone = UINT32_MAX, kMostClimbed = 256;

  uint32_t Slot(uint32_t state, int32_t token) const;
  // 0: the state has no such edge.
  uint32_t Find(uint32_t state, int32_t token) const { return slots_[Slot(state, token)]; }
  void AddEdge(uint32_t state, int32_t token, uint32_t target);
  uint32_t Split(uint32_t parent, uint32_t child, int32_t token);
  void Rehash();

  std::vector<State> states_;
  std::vector<Edge> edges_;  // index 0 is unused
  std::vector<uint32_t> slots_;  // edges by state and token, open addressing; 0: free
  uint32_t last_ = 0, size_ = 0, match_length_ = 0, match_end_ = 0;
};

}  // namespace llmc
