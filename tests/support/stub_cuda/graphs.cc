// Captures and graphs.
#include "graphs.h"

#include "kernels.h"

namespace stub_cuda {
namespace {

constexpr int kUnjoined = 901;

// Marks a node and all that it is behind.
void Reach(const Graph& graph, size_t node, std::vector<bool>* reached) {
  if ((*reached)[node]) return;
  (*reached)[node] = true;
  for (const size_t before : graph.nodes[node]->behind) Reach(graph, before, reached);
}

// An order of nodes that keeps what each is behind: those of the graph's own stream as they were captured, those beside
// it as late as they may, or as early.
std::vector<size_t> Order(const Graph& graph, bool ahead) {
  std::vector<size_t> order;
  std::vector<bool> done(graph.nodes.size());
  const std::function<void(size_t)> take = [&](size_t node) {
    if (done[node]) return;
    for (const size_t before : graph.nodes[node]->behind) take(before);
    done[node] = true;
    order.push_back(node);
  };
  const auto take_ready = [&] {
    for (size_t node = 0; node < done.size(); ++node) {
      const auto& one = *graph.nodes[node];
      bool ready = one.beside && !done[node];
      for (const size_t before : one.behind) ready = ready && done[before];
      if (ready) take(node);
    }
  };
  for (size_t node = 0; node < done.size(); ++node) {
    if (ahead) take_ready();
    if (!graph.nodes[node]->beside) take(node);
  }
  for (size_t node = 0; node < done.size(); ++node) take(node);
  return order;
}

}  // namespace
}  // namespace stub_cuda

using namespace stub_cuda;

API cuStreamBeginCapture_v2(void* stream, int mode) {
  BEGIN("StreamBeginCapture", true)
  auto* s = Alive<Stream>(stream, "stream", "cuStreamBeginCapture");
  if (!s) return kInvalidHandle;
  if (s->captured.graph || mode != 1) return Wrong("cuStreamBeginCapture");
  static uint64_t number = 0;
  s->captured = {Make<Graph>("graph"), ++number};
  ++world().captures;
  return kOk;
}
// All that was captured in other streams has to be before the end of the stream with which the capture began.
API cuStreamEndCapture(void* stream, void** graph) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamEndCapture");
  if (!s || !s->captured.graph || s->captured.beside) return Wrong("cuStreamEndCapture of a stream that began none");
  Graph* made = s->captured.graph;
  std::vector<bool> reached(made->nodes.size());
  for (const size_t node : s->captured.last) Reach(*made, node, &reached);
  for (const auto& [handle, kind] : world().alive) {
    auto* other = static_cast<Stream*>(handle);
    if (kind == "stream" && other != s && other->captured.number == s->captured.number) other->captured = {};
  }
  s->captured = {};
  --world().captures;
  *graph = made;
  if (const int code = Begin("StreamEndCapture", true)) return code;
  for (const bool one : reached) {
    if (one) continue;
    *graph = nullptr;
    End<Graph>(made, "graph", "cuStreamEndCapture");
    return kUnjoined;
  }
  return kOk;
}
API cuGraphCreate(void** out, unsigned flags) {
  BEGIN("GraphCreate", true)
  if (flags) return Wrong("cuGraphCreate with flags");
  *out = Make<Graph>("graph");
  return kOk;
}
API cuGraphDestroy(void* graph) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return End<Graph>(graph, "graph", "cuGraphDestroy");
}
struct NodeParams {
  void* kernel;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
};
API cuGraphAddKernelNode(void** out, void* graph, void* const* after, size_t count, const NodeParams* p) {
  BEGIN("GraphAddKernelNode", true)
  auto* of = Alive<Graph>(graph, "graph", "cuGraphAddKernelNode");
  if (!of) return kInvalidHandle;
  if (p->extra) return Wrong("arguments in two ways");
  Launch launch;
  if (const int code = Take("cuGraphAddKernelNode", Alive<Kernel>(p->kernel, "kernel", "cuGraphAddKernelNode"), p->grid,
                            p->block, p->shared, p->arguments, &launch)) {
    return code;
  }
  auto node = std::make_unique<Operation>();
  node->uses = Uses(launch);
  node->work = [=](const char* how) { return Run(launch, how), true; };
  // Each behind the one before it: no kernel reads what another one still writes.
  const bool chained = of->nodes.empty() ? count == 0 : count == 1 && after[0] == of->nodes.back().get();
  if (!chained) return Wrong("a node that is not behind the one before it");
  if (count) node->behind = {of->nodes.size() - 1};
  *out = node.get();
  of->nodes.push_back(std::move(node));
  return kOk;
}
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags) {
  BEGIN("GraphInstantiate", true)
  auto* of = Alive<Graph>(graph, "graph", "cuGraphInstantiate");
  if (!of) return kInvalidHandle;
  if (flags) return Wrong("cuGraphInstantiate with flags");
  auto exec = std::make_unique<Exec>();
  for (const size_t node : Order(*of, Fact("ahead", 0) != 0)) {
    exec->steps.push_back({of->nodes[node]->work, of->nodes[node]->uses, "replayed"});
  }
  for (Operation& step : exec->steps) step.uses.push_back(exec.get());
  world().execs[exec.get()] = static_cast<size_t>(Fact("graph", 1 << 20));
  world().alive[exec.get()] = "exec";
  *out = exec.release();
  return kOk;
}
API cuGraphUpload(void* exec, void* stream) {
  BEGIN("GraphUpload", true)
  auto* of = Alive<Exec>(exec, "exec", "cuGraphUpload");
  if (!of || !Alive<Stream>(stream, "stream", "cuGraphUpload")) return kInvalidHandle;
  of->uploaded = true;
  return kOk;
}
API cuGraphLaunch(void* exec, void* stream) {
  BEGIN("GraphLaunch", true)
  auto* of = Alive<Exec>(exec, "exec", "cuGraphLaunch");
  auto* s = Alive<Stream>(stream, "stream", "cuGraphLaunch");
  if (!of || !s) return kInvalidHandle;
  if (!of->uploaded) return Wrong("a graph is uploaded by its first replay");
  if (s->captured.graph) return Wrong("a graph in a stream that is captured");
  for (const Operation& step : of->steps) s->waiting.push_back(step);
  s->added += of->steps.size();
  s->computes = true;
  return kOk;
}
API cuGraphExecDestroy(void* exec) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  world().execs.erase(exec);
  if (Used(exec)) Wrong("a graph is destroyed while a stream uses it");
  return End<Exec>(exec, "exec", "cuGraphExecDestroy");
}
