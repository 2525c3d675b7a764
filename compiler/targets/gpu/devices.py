"""Devices of this machine, to decide whether an artifact can run here."""

from __future__ import annotations

import ctypes
from functools import cache

from llmc.cuda_loader import cuda_library
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


_CAPABILITY = (75, 76)  # attributes: major, minor


@cache
def cuda_capabilities() -> tuple[int, ...]:
    """10 × major + minor of the compute capability of each GPU that a CUDA driver finds."""
    try:
        cuda = ctypes.CDLL(cuda_library())
        start, count_of, attribute_of = cuda.cuInit, cuda.cuDeviceGetCount, cuda.cuDeviceGetAttribute
        device_of = cuda.cuDeviceGet
    except (OSError, AttributeError):
        return ()
    count, found = ctypes.c_int(), []
    if start(0) != 0 or count_of(ctypes.byref(count)) != 0:
        return ()
    for number in range(count.value):
        device, parts = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        if device_of(ctypes.byref(device), number) != 0:
            continue
        asked = zip(parts, _CAPABILITY, strict=True)
        if all(attribute_of(ctypes.byref(part), attribute, device) == 0 for part, attribute in asked):
            found.append(10 * parts[0].value + parts[1].value)
    return tuple(found)
