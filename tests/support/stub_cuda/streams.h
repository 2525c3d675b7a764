// Streams of the stand-in: what was put into one happens as late as it may. What was put into streams without kernels
// happens as early, if a test says "ahead=1", and beside what graphs do with "ahead=2". Graphs keep what each of their
// nodes is behind.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "world.h"

namespace stub_cuda {

struct Event {
  uint64_t stream = 0, end = 0;  // the number of its stream, 0: never recorded; operations there that it waits for
  uint64_t capture = 0;  // it was recorded in that one
  std::vector<size_t> last{};
};
// work: told how it runs, "launched" or "replayed". False: it waits for another process, and is called again.
struct Operation {
  std::function<bool(const char* how)> work;
  std::vector<const void*> uses;  // memory, kernels, graphs, communicators
  const char* how = "launched";
  bool kernel = false;
  std::optional<Event> awaits{};  // it only waits for that
  // Of a node of a graph: the nodes it is behind, and whether it was captured in another stream than the graph's own.
  std::vector<size_t> behind{};
  bool beside = false;
};
struct Graph {
  std::vector<std::unique_ptr<Operation>> nodes;
};
// A stream that is captured: the graph, and the nodes that the next one is behind.
struct Capture {
  Graph* graph = nullptr;
  uint64_t number = 0;
  bool beside = false;
  std::vector<size_t> last{};
};
struct Stream {
  uint64_t number = 0;
  std::deque<Operation> waiting;
  uint64_t added = 0, done = 0;
  bool computes = false;  // it has had kernels
  bool runs = false;  // an operation of it is executed
  Capture captured;
};

// The stream of that number, nullptr: it has ended, with all its work.
Stream* StreamOf(uint64_t number);
// What a stream has to do, until there is no more or `end` operations are done. False: one waits for another process.
bool Proceed(Stream* s, uint64_t end = UINT64_MAX);
void Drain(Stream* s, uint64_t end = UINT64_MAX);
int AddWaiting(Stream* s, std::vector<const void*> uses, std::function<bool(const char*)> work, bool kernel = false);
template <class Work>
int Add(Stream* s, std::vector<const void*> uses, Work work) {
  return AddWaiting(s, std::move(uses), [work](const char*) { return work(), true; });
}
// Executes what may happen by now in streams that only copy, if a test says so. replays: a graph has done something.
void GoAhead(bool replays);
// Whether what waits in a stream uses memory from `at` on, or a handle.
bool Used(const void* at, size_t bytes = 1);

}  // namespace stub_cuda
