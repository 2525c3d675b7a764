// Marks of requests: nothing before anybody asks, the order, and a full list that ends the noting until it is taken.
#include "engine/request_marks.h"

#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

llmc_request_mark Mark(uint64_t id) { return {0, LLMC_MARK_PREFILL, id, 0, 0, 0, 1, 5, 9}; }

std::vector<llmc_request_mark> Take(RequestMarks* marks, bool* complete) {
  std::vector<llmc_request_mark> room;
  room.reserve(RequestMarks::kMost);
  marks->Take(&room, complete);
  return room;
}

void TestNothingBeforeTheFirstCall() {
  RequestMarks marks;
  bool complete = true;
  CHECK(!marks.on());
  marks.Add(Mark(1));
  CHECK(Take(&marks, &complete).empty());
  CHECK(!complete);
  CHECK(marks.on());
}

void TestOrder() {
  RequestMarks marks;
  bool complete = false;
  Take(&marks, &complete);
  for (uint64_t id : {3, 1, 2}) marks.Add(Mark(id));
  const auto all = Take(&marks, &complete);
  CHECK(complete);
  if (!CHECK_EQ(all.size(), 3u)) return;
  CHECK_EQ(all[0].request_id, 3u);
  CHECK_EQ(all[2].request_id, 2u);
  CHECK(Take(&marks, &complete).empty());
}

void TestAFullListEndsIt() {
  RequestMarks marks;
  bool complete = false;
  Take(&marks, &complete);
  for (uint64_t id = 0; id <= RequestMarks::kMost; ++id) marks.Add(Mark(id));
  CHECK(!marks.on());
  const auto all = Take(&marks, &complete);
  CHECK(!complete);
  CHECK_EQ(all.size(), RequestMarks::kMost);
  CHECK_EQ(all.back().request_id, RequestMarks::kMost - 1);
  marks.Add(Mark(7));
  CHECK_EQ(Take(&marks, &complete).size(), 1u);
  CHECK(complete);
}

}  // namespace

int main() {
  TestNothingBeforeTheFirstCall();
  TestOrder();
  TestAFullListEndsIt();
  return Finish("request_marks_test");
}
