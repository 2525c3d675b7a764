// What stub_nccl.cc and tests ask the stand-in.
#include <algorithm>
#include <chrono>
#include <thread>

#include "graphs.h"

using namespace stub_cuda;

// ---- what stub_nccl.cc asks ------------------------------------------------------------------------------------

// A GPU goes on while nobody asks for it: other processes wait for what it gathers.
void Pump() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const std::lock_guard<std::recursive_mutex> lock(world().mutex);
    for (const auto& [handle, kind] : world().alive) {
      if (kind == "stream") Proceed(static_cast<Stream*>(handle));
    }
  }
}

API stub_cuda_in_context() { return t_contexts.empty() ? 0 : 1; }
// Enqueues what reads and writes memory of the GPU for a communicator; again and again, until work(context) is true.
API stub_cuda_enqueue(void* stream, const void* from, void* to, size_t read, size_t written, const void* comm,
                      bool (*work)(void*), void* context) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "a collective");
  if (!s || t_contexts.empty()) return kInvalidHandle;
  if (!Inside(world().memory, from, read) || !Inside(world().memory, to, written)) return kInvalidValue;
  static const bool pumped = (std::thread(Pump).detach(), true);
  static_cast<void>(pumped);
  return AddWaiting(s, {from, to, comm}, [=](const char*) { return work(context); });
}
// Whether a graph, or what waits in a stream, uses a communicator.
API stub_cuda_uses(const void* comm) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const auto named = [&](const Operation& one) {
    return std::find(one.uses.begin(), one.uses.end(), comm) != one.uses.end();
  };
  for (const auto& [handle, kind] : world().alive) {
    if (kind != "exec") continue;
    const auto& steps = static_cast<Exec*>(handle)->steps;
    if (std::any_of(steps.begin(), steps.end(), named)) return 1;
  }
  return Used(comm) ? 1 : 0;
}

// ---- what tests ask --------------------------------------------------------------------------------------------

// A line for each mistake of the program, and for each thing that it has not given back.
extern "C" __attribute__((visibility("default"))) const char* stub_cuda_report() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  const World& w = world();
  text.clear();
  for (const std::string& line : w.wrong) text += line + "\n";
  for (const auto& [handle, kind] : w.alive) {
    if (kind != "kernel") text += "left: a " + kind + "\n";
  }
  if (!w.memory.empty()) text += "left: memory of the GPU\n";
  if (!w.pinned.empty()) text += "left: pinned memory\n";
  if (w.retained) text += "left: a context\n";
  return text.c_str();
}
// Kernels that ran since the last call, a line each: name, groups, launched or replayed, with a plus if they may begin
// early.
extern "C" __attribute__((visibility("default"))) const char* stub_cuda_launches() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  text.clear();
  for (const std::string& line : world().launched) text += line + "\n";
  world().launched.clear();
  return text.c_str();
}
// Calls that failed by chance, or as the one that was ordered to.
extern "C" __attribute__((visibility("default"))) long long stub_cuda_failed() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return world().num_failed;
}
// As if the process began anew, but for what is alive.
extern "C" __attribute__((visibility("default"))) void stub_cuda_recover() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  world().lost = 0;
  world().calls.clear();
  world().wrong.clear();
  world().launched.clear();
}
// Where the suite of device.h ends with what is left: a report on stderr, and a failure.
__attribute__((destructor)) static void AtEnd() {
  if (!std::getenv("STUB_CUDA_STRICT")) return;
  const char* text = stub_cuda_report();
  if (!*text) return;
  std::fprintf(stderr, "stub_cuda: at the end:\n%s", text);
  std::_Exit(70);
}
