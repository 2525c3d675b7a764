// Allocations that fail when a test asks for it, on its thread alone. Include it in one source file of a program.
#pragma once
#include <cstdlib>
#include <new>

namespace llmc_test {

inline thread_local long allocations_left = -1;  // until they fail; negative: no limit
inline thread_local long failures_left = -1;     // allocations that fail then; negative: all

inline void* Allocate(std::size_t bytes) {
  if (allocations_left == 0 && failures_left != 0) {
    if (failures_left > 0) --failures_left;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(bytes ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace llmc_test

void* operator new(std::size_t bytes) { return llmc_test::Allocate(bytes); }
void* operator new[](std::size_t bytes) { return llmc_test::Allocate(bytes); }
// std::stable_sort allocates this way, and sorts without memory if it fails.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return llmc_test::Allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
