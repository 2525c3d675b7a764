"""Finds the library of the CUDA driver."""

from __future__ import annotations

import os


def cuda_library() -> str:
    """The path in $LLMC_CUDA_LIBRARY, else the driver's name for the system's linker."""
    return os.environ.get("LLMC_CUDA_LIBRARY") or "libcuda.so.1"
