"""The machine's limits, measured: memory read bandwidth and float32 FMA peak for a number of threads.

The probes are C, built with the host compiler: enough independent accumulators that the units, not latency, limit.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
typedef struct { const char *data; size_t bytes; float result; } job;
static void *read_all(void *p) {
  job *j = p; float sum = 0;
#ifdef __AVX512F__
  __m512i a[8]; for (int i = 0; i < 8; ++i) a[i] = _mm512_setzero_si512();
  for (size_t at = 0; at + 512 <= j->bytes; at += 512)
    for (int i = 0; i < 8; ++i) a[i] = _mm512_xor_si512(a[i], _mm512_load_si512(j->data + at + 64 * i));
  for (int i = 0; i < 8; ++i) sum += _mm512_reduce_add_epi32(a[i]);
#else
  __m256i a[8]; for (int i = 0; i < 8; ++i) a[i] = _mm256_setzero_si256();
  for (size_t at = 0; at + 256 <= j->bytes; at += 256)
    for (int i = 0; i < 8; ++i) a[i] = _mm256_xor_si256(a[i], _mm256_load_si256((const void *)(j->data + at + 32 * i)));
  for (int i = 0; i < 8; ++i) sum += _mm256_extract_epi32(a[i], 0);
#endif
  j->result = sum; return 0;
}
static void *multiply(void *p) {
  job *j = p;
#ifdef __AVX512F__
  __m512 a[16], x = _mm512_set1_ps(1.0000001f), y = _mm512_set1_ps(0.5f);
  for (int i = 0; i < 16; ++i) a[i] = _mm512_set1_ps((float)i);
  for (size_t n = 0; n < j->bytes; ++n) {
    for (int i = 0; i < 16; ++i) a[i] = _mm512_fmadd_ps(a[i], x, y);
    __asm__ volatile("" : "+v"(x));
  }
  for (int i = 0; i < 16; ++i) j->result += _mm512_reduce_add_ps(a[i]);
#else
  __m256 a[12], x = _mm256_set1_ps(1.0000001f), y = _mm256_set1_ps(0.5f);
  for (int i = 0; i < 12; ++i) a[i] = _mm256_set1_ps((float)i);
  for (size_t n = 0; n < j->bytes; ++n) {
    for (int i = 0; i < 12; ++i) a[i] = _mm256_fmadd_ps(a[i], x, y);
    __asm__ volatile("" : "+x"(x));
  }
  for (int i = 0; i < 12; ++i) j->result += _mm256_cvtss_f32(a[i]);
#endif
  return 0;
}
static double timed(void *(*f)(void *), job *jobs, int threads) {
  pthread_t t[256]; double start = now();
  for (int i = 1; i < threads; ++i) pthread_create(&t[i], 0, f, &jobs[i]);
  f(&jobs[0]);
  for (int i = 1; i < threads; ++i) pthread_join(t[i], 0);
  return now() - start;
}
double read_bandwidth(int threads, size_t total) { /* bytes a second */
  static char *data; static size_t have;
  if (have < total) {
    data = aligned_alloc(1 << 21, total);
    madvise(data, total, MADV_HUGEPAGE);
    memset(data, 1, total);
    have = total;
  }
  job jobs[256]; size_t share = total / threads / 4096 * 4096;
  for (int i = 0; i < threads; ++i) jobs[i] = (job){data + share * i, share, 0};
  return (double)share * threads / timed(read_all, jobs, threads);
}
double fma_peak(int threads, size_t rounds) { /* operations a second */
  job jobs[256];
  for (int i = 0; i < threads; ++i) jobs[i] = (job){0, rounds, 0};
#ifdef __AVX512F__
  double ops = 16.0 * 16 * 2;
#else
  double ops = 12.0 * 8 * 2;
#endif
  return ops * rounds * threads / timed(multiply, jobs, threads);
}
"""


class Limits:
    """Probes of this machine; each call measures once, so a benchmark can interleave them with its own runs."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        source = Path(self._directory.name) / "limits.c"
        library = source.with_suffix(".so")
        source.write_text(SOURCE)
        subprocess.run(
            ["cc", "-O3", "-funroll-all-loops", "-march=native", "-shared", "-fPIC", "-pthread", source, "-o", library],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        for name in ("read_bandwidth", "fma_peak"):
            function = getattr(self._library, name)
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_size_t]

    def read_bandwidth(self, threads: int, total_bytes: int = 1 << 30) -> float:
        """Bytes a second that `threads` threads read together from memory far larger than the caches."""
        return float(self._library.read_bandwidth(threads, total_bytes))

    def fma_peak(self, threads: int, rounds: int = 10_000_000) -> float:
        """float32 operations a second (a fused multiply-add is two)."""
        return float(self._library.fma_peak(threads, rounds))
