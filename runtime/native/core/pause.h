// Pause of a thread that polls a flag.
#pragma once

namespace llmc {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace llmc
