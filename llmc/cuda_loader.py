"""Finds the libraries of the CUDA driver and of NCCL."""

from __future__ import annotations

import os


def cuda_library() -> str:
    """The path in $LLMC_CUDA_LIBRARY, else the driver's name for the system's linker."""
    return os.environ.get("LLMC_CUDA_LIBRARY") or "libcuda.so.1"


def nccl_library() -> str:
    """The path in $LLMC_NCCL_LIBRARY, else NCCL's name for the system's linker."""
    return os.environ.get("LLMC_NCCL_LIBRARY") or "libnccl.so.2"
