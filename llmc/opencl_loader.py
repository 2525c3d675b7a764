"""The library that finds OpenCL drivers."""

from __future__ import annotations

import os


def opencl_library() -> str:
    """$LLMC_OPENCL_LIBRARY, a path, else the name that the system's linker knows such a library by."""
    return os.environ.get("LLMC_OPENCL_LIBRARY") or "libOpenCL.so.1"
