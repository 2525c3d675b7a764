"""Calls one helper of `kernels/ir` by itself: a kernel that does nothing else."""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.codegen import compile_object, llvm_text
from llmc.compiler.targets.cpu.target import Target, enable
from llmc.compiler.targets.elf.link import link_shared

from support.kernel_harness import Guarded

_DEFINITION = re.compile(r"^define linkonce_odr hidden (.+?) @llmc_(\w+)\((.*?)\) #0", re.MULTILINE)
_VECTORS = {"<16 x float>": "float32", "<16 x i32>": "int32", "<16 x i16>": "int16"}
_SCALARS = {"i32": "int32", "float": "float32"}
_folder = tempfile.TemporaryDirectory(prefix="llmc-helpers-")


def signatures(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Result and argument types of the helpers that an IR text defines, by name."""
    found = {}
    for result, name, args in _DEFINITION.findall(text):
        found[name] = result, tuple(arg.rpartition(" ")[0] for arg in args.split(", ") if arg)
    return found


def _kernel(text: str, name: str) -> Any:
    """Buffers a0, a1, … hold the arguments, r takes the result."""
    result, args = signatures(text)[name]
    buffers = [(f"a{i}", _VECTORS.get(kind, "int32")) for i, kind in enumerate(args)]
    kernel = b.Kernel(f"probe_{name}", [*buffers, ("r", {**_VECTORS, **_SCALARS}[result])], text)
    with kernel as k:
        given = []
        for i, kind in enumerate(args):
            buffer = k[f"a{i}"]
            at = {"ptr": b.at(buffer, 0), "i32": buffer[0]}
            given.append(at[kind] if kind in at else buffer[T.ramp(0, 1, b.WIDTH)])
        if result in _VECTORS:
            value = T.call_extern(f"{_VECTORS[result]}x16", f"llmc_{name}", *given)
            b.store(k["r"], value, T.ramp(0, 1, b.WIDTH))
        else:
            b.store(k["r"], T.call_extern(_SCALARS[result], f"llmc_{name}", *given), 0)
    return kernel.function()


@functools.cache
def _compiled(text: str, name: str, target: Target) -> Any:
    path = Path(_folder.name) / f"{name}-{target.name}-{abs(hash(text))}.so"
    link_shared([compile_object(_kernel(text, name), target)], path)
    enable(target)
    function = ctypes.CDLL(str(path))[f"probe_{name}"]
    function.restype = None
    return function


def call(text: str, name: str, target: Target, *args: NDArray[Any] | int) -> NDArray[Any]:
    """The result, 16 lanes or one number. args: vectors, numbers, and arrays in the place of pointers, which are
    written to."""
    result, kinds = signatures(text)[name]
    assert len(kinds) == len(args), f"{name} takes {kinds}"
    arrays = [np.array([arg], np.int32) if isinstance(arg, int) else arg for arg in args]
    for array, kind in zip(arrays, kinds, strict=True):
        assert kind not in _VECTORS or (array.shape, array.dtype) == ((16,), np.dtype(_VECTORS[kind]))
    buffers = [Guarded(array) for array in (*arrays, np.zeros(16, {**_VECTORS, **_SCALARS}[result]))]
    pointers = [ctypes.c_void_p(buffer.address) for buffer in buffers]
    _compiled(text, name, target)(*pointers, (ctypes.c_int64 * 8)(), ctypes.c_int32(0), ctypes.c_int32(1))
    for array, buffer in zip(arrays, buffers, strict=False):
        buffer.check(name)
        array[...] = buffer.array
    out = buffers[-1].array
    return out if result in _VECTORS else out[:1]


def assembly(text: str, name: str, target: Target) -> str:
    """The machine code of the probe of a helper, for a target that this machine need not run."""
    return llvm_text(_kernel(text, name), target, "asm")
