"""Limits of this machine, measured by the native library: memory read rate and arithmetic rates."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_void_p

from llmc.runtime.binding import abi
from llmc.runtime.binding.handle import Handle, LlmcError, call, initial

LIMITS = ("read", "f32", "bf16", "int8")
UNSUPPORTED_TARGET = 6


class Probe(Handle):
    """Measures one limit at a time, with `num_threads` threads (0: all CPUs of this process).

    Owns `read_bytes` of memory, which must far exceed the caches.
    """

    _destroy = "llmc_probe_destroy"

    def __init__(self, num_threads: int = 0, read_bytes: int = 512 << 20, pin_threads: bool = True) -> None:
        super().__init__()
        options = initial("llmc_probe_options_init", abi.ProbeOptions)
        options.num_threads, options.pin_threads, options.read_bytes = num_threads, int(pin_threads), read_bytes
        pointer = c_void_p()
        call("llmc_probe_create", byref(options), byref(pointer))
        self._pointer = pointer

    def measure(self, limit: str, seconds: float = 0.2) -> float | None:
        """Bytes per second for "read"; operations per second (two per multiply-add) for "f32", "bf16" and "int8".

        "bf16" and "int8" use the CPU's widest product instructions, tiles or dot products; None without any.
        """
        if limit not in LIMITS:
            raise ValueError(f"limit is {limit!r}; choose one of {', '.join(LIMITS)}")
        rate = c_double()
        try:
            call("llmc_probe_measure", self.pointer, LIMITS.index(limit), ctypes.c_double(seconds), byref(rate))
        except LlmcError as error:
            if error.code == UNSUPPORTED_TARGET:
                return None
            raise
        return rate.value
