"""Calls into the native library: errors, owned handles, structs and arrays. Imports neither torch nor tvm."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from ctypes import byref, c_void_p
from numbers import Real
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.cpu_levels import level_limit
from llmc.runtime.binding import abi
from llmc.runtime.binding.library import load_library
from llmc.shown import shown

IntArray = npt.ArrayLike  # converted to a contiguous int32 array

ERROR_NAMES = (
    "ok",
    "invalid_argument",
    "not_found",
    "io",
    "corrupt",
    "version",
    "unsupported_target",
    "out_of_memory",
    "out_of_range",
    "queue_full",
    "bucket_miss",
    "internal",
    "empty_mask",
    "not_finite",
    "device_failed",
    "device_lost",
)


def error_name(code: int) -> str:
    """Lower-case name of an llmc_status; its number if unknown to this version."""
    return ERROR_NAMES[code] if 0 <= code < len(ERROR_NAMES) else str(code)


class LlmcError(Exception):
    """A call of the runtime failed. code: the llmc_status. name: its lower-case name."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = error_name(code)


@functools.cache
def library() -> ctypes.CDLL:
    """The native library, loaded on first use; limited to the CPU level of LLMC_NATIVE_TARGET, if set."""
    try:
        level = level_limit(os.environ)
    except ValueError as error:
        raise LlmcError(ERROR_NAMES.index("invalid_argument"), str(error)) from None
    loaded = load_library()
    if level is not None:
        loaded.llmc_machine_limit_isa_level(level)
    return loaded


def version() -> str:
    """Version of the native library."""
    text: bytes = library().llmc_version()
    return text.decode()


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status. Raises LlmcError."""
    error = abi.Error(struct_size=ctypes.sizeof(abi.Error))
    status = getattr(library(), name)(*arguments, byref(error))
    if status != 0:
        raise LlmcError(status, error.message.decode("utf-8", "replace") or f"{name} failed with status {status}")


_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def sized(struct: type[_Struct]) -> _Struct:
    """A zeroed struct with its struct_size set."""
    value = struct()
    value.struct_size = ctypes.sizeof(struct)
    return value


def initial(init: str, struct: type[_Struct]) -> _Struct:
    """A struct with the defaults of llmc.h's function `init`."""
    value = struct()
    getattr(library(), init)(byref(value), ctypes.sizeof(struct))
    return value


def plain(struct: ctypes.Structure) -> dict[str, Any]:
    """The fields of a struct, without struct_size and reserved ones."""
    names = [field[0] for field in struct._fields_]
    return {name: getattr(struct, name) for name in names if name not in ("struct_size", "reserved")}


def named(option: str, value: str, values: Mapping[str, int]) -> int:
    """The number for an option's name. Raises ValueError."""
    if value not in values:
        raise ValueError(f"{option} is {value!r}; choose one of {', '.join(values)}")
    return values[value]


def whole(option: str, value: Any, field: type[ctypes._SimpleCData[int]]) -> int:
    """The value of an unsigned field of a struct, to which ctypes would cut any number. Raises LlmcError."""
    most = 2 ** (8 * ctypes.sizeof(field)) - 1
    number = isinstance(value, Real)
    if not number or not 0 <= value <= most or value != int(value):
        message = f"{option} is {shown(value)}; use a whole number from 0 to {most}."
        raise LlmcError(ERROR_NAMES.index("invalid_argument"), message)
    return int(value)


def int32(name: str, values: IntArray, ndim: int = 1) -> npt.NDArray[np.int32]:
    """A contiguous int32 array of `ndim` dimensions. Raises TypeError or ValueError."""
    array = np.asarray(values)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; pass integers")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; pass an array of {ndim} dimensions")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"{name} does not fit int32")
    return np.ascontiguousarray(array, dtype=np.int32)


class Handle:
    """An owned native object; close() is idempotent, and runs on leaving a with block or on deletion."""

    _destroy = ""

    def __init__(self) -> None:
        self._pointer: c_void_p | None = None

    @property
    def pointer(self) -> c_void_p:
        if not self._pointer:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._pointer

    def close(self) -> None:
        """Releases the native object; later calls on it raise ValueError."""
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer:
            getattr(library(), self._destroy)(pointer)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_Self = TypeVar("_Self", bound=Handle)
