"""All helpers written in LLVM IR text. Kernels call them as `llmc_…` and inline their text."""
