"""Single kernels on this machine's first OpenCL device, by calls of its library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

_ALL_DEVICES, _READ_WRITE, _COPY, _BUILD_LOG, _EXTENSIONS = 0xFFFFFFFF, 1, 32, 0x1183, 0x1030


class Program:
    """Kernels of a program. source: with the prelude. lanes: items that run in step, as the device's facts have it."""

    def __init__(self, source: str, lanes: int = 1) -> None:
        self._cl = ctypes.CDLL("libOpenCL.so.1")
        for name in ("clCreateContext", "clCreateCommandQueue", "clCreateProgramWithSource", "clCreateKernel",
                     "clCreateBuffer"):  # fmt: skip
            getattr(self._cl, name).restype = c_void_p
        platform, device, status = c_void_p(), c_void_p(), c_int32()
        self._check(self._cl.clGetPlatformIDs(c_uint32(1), byref(platform), None))
        self._check(self._cl.clGetDeviceIDs(platform, c_uint64(_ALL_DEVICES), c_uint32(1), byref(device), None))
        self._context = c_void_p(self._cl.clCreateContext(None, c_uint32(1), byref(device), None, None, byref(status)))
        self._queue = c_void_p(self._cl.clCreateCommandQueue(self._context, device, c_uint64(0), byref(status)))
        text = c_char_p(source.encode())
        made = self._cl.clCreateProgramWithSource(self._context, c_uint32(1), byref(text), None, byref(status))
        self._program = c_void_p(made)
        options = self._options(device, lanes).encode()
        if self._cl.clBuildProgram(self._program, c_uint32(1), byref(device), options, None, None):
            log = ctypes.create_string_buffer(1 << 16)
            self._cl.clGetProgramBuildInfo(self._program, device, c_uint32(_BUILD_LOG), c_size_t(1 << 16), log, None)
            raise AssertionError(log.value.decode())

    def _options(self, device: c_void_p, lanes: int) -> str:
        """Those with which llmc builds programs."""
        if lanes == 1:
            return "-cl-std=CL1.2"
        said = ctypes.create_string_buffer(1 << 16)
        self._check(self._cl.clGetDeviceInfo(device, c_uint32(_EXTENSIONS), c_size_t(1 << 16), said, None))
        required = " -DLLMC_LANES_REQUIRED" if b"cl_intel_required_subgroup_size" in said.value.split() else ""
        return f"-cl-std=CL3.0 -DLLMC_LANES={lanes}{required}"

    def _check(self, status: int) -> None:
        assert status == 0, f"OpenCL's error {status}"

    def run(self, name: str, operands: Sequence[np.ndarray], scalars: np.ndarray, groups: int, items: int) -> None:
        """Runs a kernel, and writes to the arrays what it left in its operands. scalars: int32 [8]."""
        status = c_int32()
        kernel = c_void_p(self._cl.clCreateKernel(self._program, name.encode(), byref(status)))
        self._check(status.value)
        arrays = [*operands, scalars]
        assert all(one.flags.c_contiguous for one in arrays)
        buffers = [self._buffer(one) for one in arrays]
        offsets: list[Any] = [c_int32(0) for _ in operands]
        for at, argument in enumerate((*buffers[:-1], *offsets, buffers[-1])):
            size = c_size_t(ctypes.sizeof(argument))
            self._check(self._cl.clSetKernelArg(kernel, c_uint32(at), size, byref(argument)))
        sizes = c_size_t(groups * items), c_size_t(items)
        self._check(self._cl.clEnqueueNDRangeKernel(
            self._queue, kernel, c_uint32(1), None, byref(sizes[0]), byref(sizes[1]), c_uint32(0), None, None
        ))  # fmt: skip
        for one, buffer in zip(operands, buffers, strict=False):
            self._check(self._cl.clEnqueueReadBuffer(
                self._queue, buffer, c_uint32(1), c_size_t(0), c_size_t(one.nbytes), c_void_p(one.ctypes.data),
                c_uint32(0), None, None,
            ))  # fmt: skip
        for buffer in buffers:
            self._check(self._cl.clReleaseMemObject(buffer))
        self._check(self._cl.clReleaseKernel(kernel))

    def _buffer(self, array: np.ndarray) -> c_void_p:
        status = c_int32()
        flags, size = c_uint64(_READ_WRITE | _COPY), c_size_t(array.nbytes)
        made = self._cl.clCreateBuffer(self._context, flags, size, c_void_p(array.ctypes.data), byref(status))
        self._check(status.value)
        return c_void_p(made)
