"""Times kernel variants alternately on made-up operands, under a graph's conditions: a thread team, weights from
memory."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmc.compiler.graph.commands import round_up
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.target import Target
from llmc.compiler.targets.elf.link import link_shared

_LINE = 64
_HUGE_PAGE = 2 << 20
_LEAST_COLD_BYTES = 96 << 20
_SLACK_BYTES = 1 << 20  # kernels read ahead past a buffer's end
_CALL_S = 0.003  # approximate duration of one measurement: many calls of a small kernel
_MIN_ROUNDS = 7


@dataclass(frozen=True)
class Call:
    """The operands of a timed kernel: name → bytes, in order; and the number of rows. weight: names of operands that
    form the weight."""

    operands: Mapping[str, int]
    rows: int
    weight: tuple[str, ...] = ("w",)

    @property
    def weight_bytes(self) -> int:
        return sum(round_up(size, _LINE) for name, size in self.operands.items() if name in self.weight)


def linear_call(spec: KernelSpec, target: Target, rows: int) -> Call:
    """The operands of a `linear` or `linear_quant` kernel for `rows` rows."""
    from llmc.compiler.targets.cpu.kernels.linear.plan import operands
    from llmc.compiler.targets.cpu.kernels.linear.spec import buffers, problem_of

    p = problem_of(spec, target)
    tiles, panels = -(-rows // p.tile), p.parts * p.panels
    sizes = {"x": tiles * p.tile_words * 4, "w": panels * operands(p)[0].panel_words * p.columns * 4}
    of_planes = {n: panels * plane.count * p.columns * plane.numpy_dtype.itemsize for n, plane in p.planes.items()}
    sizes |= of_planes
    rows_bytes = tiles * p.tile * round_up(p.width, p.columns) * 4
    sizes |= {"bias": p.n * 4, "residual": rows_bytes, "y": rows_bytes}
    return Call({name: sizes[name] for name in buffers(spec)}, rows, ("w", *of_planes))


def last_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Total bytes of all last-level caches; 0 if the system does not tell."""
    sizes: dict[str, int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index3"):
        with suppress(OSError, ValueError):
            kib = int((cache / "size").read_text().strip().removesuffix("K"))
            sizes[(cache / "shared_cpu_list").read_text()] = kib << 10
    return sum(sizes.values())


class KernelTimer:
    """Owns the memory and the threads for timing. calls: all calls to be compared."""

    def __init__(self, num_threads: int, calls: Sequence[Call]) -> None:
        largest = max(sum(round_up(size, _LINE) for size in call.operands.values()) for call in calls)
        # Weights are cycled through copies that together exceed all caches.
        cold = max(_LEAST_COLD_BYTES, 2 * last_cache_bytes())
        size = round_up(largest + cold + 2 * _SLACK_BYTES, _HUGE_PAGE) + _HUGE_PAGE
        self._memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        # Bytes that are ordinary numbers in every dtype, none subnormal.
        block = np.random.default_rng(0).integers(0x3B, 0x3F, _HUGE_PAGE, np.uint8)
        for start in range(0, size, _HUGE_PAGE):
            self._bytes[start : start + _HUGE_PAGE] = block[: size - start]
        self._start = round_up(self._bytes.ctypes.data, _HUGE_PAGE)
        self._size = size - _HUGE_PAGE - _SLACK_BYTES
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._team = _Team(num_threads)
        self._stack.callback(self._team.close)
        self._loaded = 0

    def __enter__(self) -> KernelTimer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def compare(self, symbol: str, variants: Sequence[bytes], call: Call, seconds: float) -> list[float]:
        """Speed-ups of the variants (object files) over the first: medians of alternating calls, for about `seconds` in
        all."""
        kernels = [self._load(symbol, code) for code in variants]
        cold = self._copies(call)
        count, at = 1, 0

        def timed(kernel: Any) -> float:
            nonlocal at
            which = [cold[(at + i) % len(cold)] for i in range(count)]
            at += count
            begin = time.perf_counter()
            self._team.run(lambda task, tasks: [kernel(*pointers, task, tasks) for pointers in which])
            return time.perf_counter() - begin

        first = min(timed(kernel) for kernel in kernels * 2)
        count = max(1, min(len(cold), round(_CALL_S / first)))
        times: list[list[float]] = [[] for _ in kernels]
        end = time.perf_counter() + seconds
        while len(times[0]) < _MIN_ROUNDS or time.perf_counter() < end:
            order = range(len(kernels))
            for index in order if len(times[0]) % 2 else reversed(order):
                times[index].append(timed(kernels[index]))
        return [statistics.median(a / b for a, b in zip(times[0], mine, strict=True)) for mine in times]

    def _load(self, symbol: str, code: bytes) -> Any:
        path = self._folder / f"{self._loaded}.so"
        self._loaded += 1
        link_shared([code], path)
        function = getattr(ctypes.CDLL(str(path)), symbol)
        function.restype = None
        path.unlink()
        return function

    def _copies(self, call: Call) -> list[tuple[Any, ...]]:
        """Argument lists that differ only in the addresses of their weights."""
        scalars = (ctypes.c_int64 * 8)(*[call.rows] * 8)
        at, shared = self._start, {}
        for name, size in call.operands.items():
            if name not in call.weight:
                shared[name] = at
                at += round_up(size, _LINE)
        end = self._start + self._size
        copies: list[tuple[Any, ...]] = []
        while not copies or at + call.weight_bytes <= end:
            places = dict(shared)
            for name, size in call.operands.items():
                if name in call.weight:
                    places[name] = at
                    at += round_up(size, _LINE)
            pointers = [ctypes.c_void_p(places[name]) for name in call.operands]
            copies.append((*pointers, scalars))
        return copies


class _Team:
    """Threads that run a job together; the caller is one of them."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._begin, self._end = threading.Barrier(num_threads), threading.Barrier(num_threads)
        self._job: Callable[[int, int], object] | None = None
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(1, num_threads)]
        for thread in self._threads:
            thread.start()

    def run(self, job: Callable[[int, int], object]) -> None:
        self._job = job
        self._begin.wait()
        job(0, self._num_threads)
        self._end.wait()

    def close(self) -> None:
        """Also called when a job was interrupted while other threads wait for its end."""
        self._begin.abort()
        self._end.abort()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        with suppress(threading.BrokenBarrierError):
            while True:
                self._begin.wait()
                assert self._job is not None
                try:
                    self._job(index, self._num_threads)
                except BaseException:
                    self._end.abort()
                    raise
                self._end.wait()
