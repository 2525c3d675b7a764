"""Compile kernels and call them through ctypes, with guard bytes around every buffer."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.registry import build_kernel, kernel_buffers
from llmc.compiler.targets.cpu.target import TARGETS, Target, enable, native_target, runs_here
from llmc.compiler.targets.elf.link import link_shared
from llmc.cpu_levels import NATIVE_TARGET

_GUARD = 4096
_PATTERN = 0xA5
_folder = tempfile.TemporaryDirectory(prefix="llmc-kernels-")
_number = itertools.count()
libraries: dict[tuple[KernelSpec, Target], ctypes.CDLL] = {}
"""What `compiled` loaded."""


class Tolerance(TypedDict):
    """Of numpy's assert_allclose."""

    rtol: float
    atol: float


def targets_here(*names: str) -> list[Target]:
    """This machine's target, and those of `names` that it runs and that have other instruction sets.

    Where this machine is taken for a lesser one, that one alone, or none if it is of `names`: it was among the targets
    of the run as this machine.
    """
    native, others = native_target(), [TARGETS[name] for name in names]
    if os.environ.get(NATIVE_TARGET):
        return [] if native in others else [native]
    found = {native.instruction_sets: native}
    for target in others:
        if runs_here(target):
            found.setdefault(target.instruction_sets, target)
    return list(found.values())


@functools.cache
def compiled(spec: KernelSpec, target: Target, schedule: Schedule | None = None) -> Any:
    """The kernel as a C function."""
    path = Path(_folder.name) / f"{spec.symbol()}-{target.name}-{next(_number)}.so"
    link_shared([compile_object(build_kernel(spec, target, schedule), target)], path)
    if target in TARGETS.values():  # others are emulated
        enable(target)
    library = ctypes.CDLL(str(path))
    libraries[spec, target] = library
    function = library[spec.symbol()]
    function.restype = None
    return function


class Guarded:
    """A 64-byte aligned copy of an array between two fields of guard bytes."""

    def __init__(self, array: NDArray[Any]) -> None:
        size = array.nbytes
        self._raw = np.full(size + 2 * _GUARD + 64, _PATTERN, np.uint8)
        start = _GUARD + (-(self._raw.ctypes.data + _GUARD)) % 64
        self._start, self._end = start, start + size
        self.array = self._raw[start : start + size].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.address = self._raw.ctypes.data + start

    def check(self, name: str) -> None:
        assert (self._raw[: self._start] == _PATTERN).all(), f"{name}: bytes before the buffer were written"
        assert (self._raw[self._end :] == _PATTERN).all(), f"{name}: bytes after the buffer were written"


def run(
    spec: KernelSpec,
    target: Target,
    arrays: Mapping[str, NDArray[Any]],
    *,
    written: tuple[str, ...],
    scalars: Mapping[int, int],
    num_tasks: int = 1,
    schedule: Schedule | None = None,
) -> dict[str, NDArray[Any]]:
    """Run every task of a kernel; returns the written buffers. All other buffers must come back unchanged."""
    names = kernel_buffers(spec)
    assert set(names) == set(arrays), f"{spec.op} takes {names}"
    guarded = {name: Guarded(np.ascontiguousarray(arrays[name])) for name in names}
    values = (ctypes.c_int64 * 8)(*[scalars.get(i, 0) for i in range(8)])
    function = compiled(spec, target, schedule)
    for task in reversed(range(num_tasks)):
        function(
            *[ctypes.c_void_p(guarded[name].address) for name in names],
            values,
            ctypes.c_int32(task),
            ctypes.c_int32(num_tasks),
        )
    for name in names:
        guarded[name].check(name)
        if name not in written:
            before = np.ascontiguousarray(arrays[name]).view(np.uint8)
            assert (guarded[name].array.view(np.uint8) == before).all(), f"{name}: an input was written"
    return {name: guarded[name].array.copy() for name in written}
