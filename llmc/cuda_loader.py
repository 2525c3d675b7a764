"""The library of CUDA's driver."""

from __future__ import annotations

import os


def cuda_library() -> str:
    """$LLMC_CUDA_LIBRARY, a path, else the name that the system's linker knows the driver by."""
    return os.environ.get("LLMC_CUDA_LIBRARY") or "libcuda.so.1"
