// Memory that runs out in any allocation of submit and set_token_mask: the call fails and leaves no trace.
#include <cstdlib>
#include <new>

#include "engine_harness.h"

namespace {

thread_local long allocations_left = -1;  // negative: no limit

void* Allocate(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(bytes ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes); }
void* operator new[](std::size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace llmc_test;

namespace {

// Fails the first, second, … allocation of `call` until it succeeds; returns how often it failed.
template <class Call>
int FailEach(Engine* engine, const Call& call) {
  for (int failed = 0;; ++failed) {
    const uint32_t waiting = engine->Stats().num_waiting, ready = engine->Wait(0);
    Status status;
    allocations_left = failed;
    try {
      status = call();
      allocations_left = -1;
      CHECK_OK(status);
      return failed;
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
    }
    CHECK_EQ(engine->Stats().num_waiting, waiting);
    CHECK_EQ(engine->Wait(0) & LLMC_READY_EVENTS, ready & LLMC_READY_EVENTS);
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
  }
}

}  // namespace

int main() {
  auto engine = Make(Usual(), 65, {});
  Outputs outputs;
  Needs needs;
  for (int i = 0; i < 40; ++i) {  // containers grow now and then
    Job job = Simple(5, 3);
    job.guided = i % 2 == 0;
    job.params.n = 2;
    CHECK(FailEach(engine.get(), [&] { return Submit(engine.get(), &job); }) > 2);
    CHECK_EQ(job.id, static_cast<uint64_t>(i) + 1);
    for (bool more = true; more || !needs.empty();) {
      Drain(engine.get(), &outputs, &needs);
      for (const auto& need : needs) {
        std::vector<int32_t> tokens = job.prompt;
        tokens.insert(tokens.end(), outputs[need].tokens.begin(), outputs[need].tokens.end());
        const std::vector<uint32_t> mask = MaskOf(tokens);
        FailEach(engine.get(), [&] { return engine->SetTokenMask(job.id, need.second, mask.data(), mask.size()); });
      }
      needs.clear();
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      Drain(engine.get(), &outputs, &needs);
    }
    for (uint32_t k = 0; k < 2; ++k) Compare(outputs[{job.id, k}], Reference(job, k, 64));
  }
  return Finish("engine_memory_test");
}
