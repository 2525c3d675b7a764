"""Finds the library that loads OpenCL drivers."""

from __future__ import annotations

import os


def opencl_library() -> str:
    """The path in $LLMC_OPENCL_LIBRARY, else the library's name for the system's linker."""
    return os.environ.get("LLMC_OPENCL_LIBRARY") or "libOpenCL.so.1"
