"""What this machine has, as far as the compiler asks: whether artifacts run here."""

from __future__ import annotations

import ctypes
from functools import cache

from llmc.opencl_loader import opencl_library


@cache
def has_opencl() -> bool:
    """Whether an OpenCL driver is installed."""
    try:
        get_platforms = ctypes.CDLL(opencl_library()).clGetPlatformIDs
    except (OSError, AttributeError):
        return False
    count = ctypes.c_uint32()
    return get_platforms(0, None, ctypes.byref(count)) == 0 and count.value > 0
