// SuffixAutomaton: every substring of a text that grows token by token, and where the longest suffix of the text stood
// before. A token takes constant time on average, and memory is linear in the text.
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
  // Of the longest suffix of the text that also ends before its end; 0: the last token is new.
  uint32_t match_length() const { return match_length_; }
  // Where that suffix ended before: the text goes on there at this index. Of several places a late one, and the last one
  // where fewer than kMostClimbed other suffixes repeat, too.
  uint32_t match_end() const { return match_end_; }
  // Bytes that a text of so many tokens takes at most.
  static uint64_t MostBytes(uint64_t tokens);

 private:
  // A set of substrings that end at the same places; the longest of them has `length` tokens.
  struct State {
    uint32_t length, link;
    uint32_t last_end;    // a late place where they end
    uint32_t first_edge;  // 0: none
  };
  struct Edge {
    uint32_t state;
    int32_t token;
    uint32_t target;
    uint32_t next;  // of the same state; 0: none
  };
  static constexpr uint32_t kNone = UINT32_MAX, kMostClimbed = 256;

  uint32_t Slot(uint32_t state, int32_t token) const;
  // 0: the state has no such edge.
  uint32_t Find(uint32_t state, int32_t token) const { return slots_[Slot(state, token)]; }
  void AddEdge(uint32_t state, int32_t token, uint32_t target);
  uint32_t Split(uint32_t parent, uint32_t child, int32_t token);
  void Rehash();

  std::vector<State> states_;
  std::vector<Edge> edges_;  // from 1 on
  std::vector<uint32_t> slots_;  // edges by state and token, open addressing; 0: free
  uint32_t last_ = 0, size_ = 0, match_length_ = 0, match_end_ = 0;
};

}  // namespace llmc
