// The kernel ABI of FORMAT.md: buffers one by one, then scalars, task, num_tasks.
#pragma once
#include <cstdint>

namespace llmc {

inline void CallKernel(void* f, void* const* b, const int64_t* s, int32_t t, int32_t n, uint32_t num_buffers) {
  using I64 = const int64_t*;
  using P = void*;
#define LLMC_CALL(count, types, args) \
  case count: reinterpret_cast<void(*) types>(f) args; return;
#define LLMC_T(...) (__VA_ARGS__, I64, int32_t, int32_t)
#define LLMC_A(...) (__VA_ARGS__, s, t, n)
  switch (num_buffers) {
    LLMC_CALL(1, LLMC_T(P), LLMC_A(b[0]))
    LLMC_CALL(2, LLMC_T(P, P), LLMC_A(b[0], b[1]))
    LLMC_CALL(3, LLMC_T(P, P, P), LLMC_A(b[0], b[1], b[2]))
    LLMC_CALL(4, LLMC_T(P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3]))
    LLMC_CALL(5, LLMC_T(P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4]))
    LLMC_CALL(6, LLMC_T(P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5]))
    LLMC_CALL(7, LLMC_T(P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6]))
    LLMC_CALL(8, LLMC_T(P, P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]))
    LLMC_CALL(9, LLMC_T(P, P, P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8]))
    LLMC_CALL(10, LLMC_T(P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9]))
    LLMC_CALL(11, LLMC_T(P, P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10]))
    LLMC_CALL(12, LLMC_T(P, P, P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11]))
    default: return;  // the artifact was validated: 1 … 12
  }
#undef LLMC_A
#undef LLMC_T
#undef LLMC_CALL
}

}  // namespace llmc
