"""Every helper that is written in LLVM IR text. Kernels call them as `llmc_…` and have their text inlined."""
