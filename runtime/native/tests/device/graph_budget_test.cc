// Which graphs are recorded within a budget: shares of decode and prompts, order, and what one kind leaves the other.
#include "device/gpu/graph_budget.h"

#include <string>

#include "support/check.h"

using namespace llmc;

namespace {

// Graphs by letter, d: decode, p: prefill, m: mixed; each takes the bytes that its digit says. The graphs that are
// recorded, in the order in which they were.
std::string Recorded(const std::string& graphs, const GraphBudget& budget) {
  std::vector<GraphShape> shapes;
  for (size_t i = 0; i < graphs.size(); i += 2) {
    GraphShape shape{};
    shape.phase = graphs[i] == 'd' ? Phase::kDecode : graphs[i] == 'p' ? Phase::kPrefill : Phase::kMixed;
    shapes.push_back(shape);
  }
  std::string recorded;
  uint64_t all = 0;
  CHECK_OK(RecordWithin(shapes, budget, [&](uint32_t graph, uint64_t room, uint64_t* taken, bool* done) {
    const uint64_t bytes = static_cast<uint64_t>(graphs[2 * graph + 1] - '0');
    if (bytes > room) return Status::Ok();
    CHECK(recorded.find(static_cast<char>('0' + graph)) == std::string::npos);
    recorded += static_cast<char>('0' + graph);
    all += * taken = bytes;
    *done = true;
    return Status::Ok();
  }));
  CHECK(all <= budget.bytes);
  return recorded;
}

GraphBudget Of(uint64_t bytes, uint64_t prompt_bytes = GraphBudget::kUndivided, std::vector<uint32_t> order = {}) {
  GraphBudget budget;
  budget.bytes = bytes;
  budget.prompt_bytes = prompt_bytes;
  budget.order = std::move(order);
  return budget;
}

void TestShares() {
  CHECK_EQ(Recorded("p2d2m2d2", Of(UINT64_MAX)), "1302");  // no limit: decode first
  CHECK_EQ(Recorded("p2d2m2d2", Of(4)), "13");
  CHECK_EQ(Recorded("p2d2m2d2", Of(4, 2)), "10");
  CHECK_EQ(Recorded("p2d2m2d2", Of(4, 4)), "02");
  CHECK_EQ(Recorded("p2d2m2d2", Of(4, 9)), "02");  // a share is never more than the whole
  CHECK_EQ(Recorded("p2d2m2d2", Of(0)), "");
  // A graph that does not fit is left out, and smaller ones behind it are not.
  CHECK_EQ(Recorded("d3d5d1", Of(4)), "02");
}

void TestWhatIsLeft() {
  CHECK_EQ(Recorded("p2d2m2", Of(6, 1)), "102");  // decode has all: prompts get the rest
  CHECK_EQ(Recorded("p2d2d2", Of(6, 5)), "012");  // and the other way round
  CHECK_EQ(Recorded("p2d9m2", Of(6, 3)), "0");    // decode lacks a graph: its share stays its own
}

void TestOrder() {
  CHECK_EQ(Recorded("d2p2d2p2", Of(4, 2, {3, 2, 1, 0})), "23");
  CHECK_EQ(Recorded("d2p2d2p2", Of(8, 4, {3, 3, 77})), "0231");  // others follow; twice or unknown is nothing
  GraphBudget eager = Of(8);
  eager.eager = true;
  CHECK_EQ(Recorded("d2p2", eager), "");
}

void TestErrors() {
  const std::vector<GraphShape> shapes(3);
  uint32_t calls = 0;
  const Status status = RecordWithin(shapes, {}, [&](uint32_t, uint64_t, uint64_t*, bool*) {
    ++calls;
    return Status::Error(LLMC_ERR_INTERNAL, "no");
  });
  CHECK_EQ(status.code, static_cast<int32_t>(LLMC_ERR_INTERNAL));
  CHECK_EQ(calls, 1u);
}

void TestOptions() {
  GraphBudget budget;
  const DeviceOptions given = {{"graph_mib", "3"}, {"graph_prompt_mib", "1"}, {"graph_order", "2,0,1"}, {"eager", "1"}};
  OptionReader reader("toy", given);
  budget.Read(&reader);
  CHECK_OK(reader.Finish());
  CHECK(budget.eager && budget.bytes == 3 << 20 && budget.prompt_bytes == 1 << 20);
  CHECK(budget.order == std::vector<uint32_t>({2, 0, 1}));
  for (const char* wrong : {"", "1,", ",1", "1 2", "-1", "a", "99999999999"}) {
    const DeviceOptions order = {{"graph_order", wrong}};
    OptionReader bad("toy", order);
    budget.Read(&bad);
    CHECK(bad.Finish().message.find("whole numbers from 0 to") != std::string::npos);
  }
}

}  // namespace

int main() {
  TestShares();
  TestWhatIsLeft();
  TestOrder();
  TestErrors();
  TestOptions();
  return llmc_test::Finish("graph_budget_test");
}
