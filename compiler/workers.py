"""Processes that compile kernels; one thread each talks to them over pipes.

They are separate programs. A forked child could inherit locks held by threads of torch and TVM. A process spawned by
multiprocessing imports the caller's `__main__`, which would rerun a script without a guard. A worker ends when its
stdin closes, so none outlives a killed compiler.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any

from llmc.compiler.config import CompileError
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.base import Target

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from llmc.compiler.workers import serve; serve()"
_LENGTH_BYTES = 8

Variant = tuple[KernelSpec, str | None]
"""A kernel and its schedule in the target's text form; None for the default."""


def compile_kernels(
    variants: Sequence[Variant], target: Target, num_workers: int
) -> Generator[tuple[Variant, bytes], None, None]:
    """Yields each variant with its code as it is done; no worker remains when the iteration ends, however it ends.

    Raises CompileError naming the kernel if it cannot be compiled or its process dies.
    """
    workers: list[_Worker] = []
    own, starting, ended = threading.local(), threading.Lock(), False

    def compile_one(variant: Variant) -> bytes:
        # Started here and not by the caller, whom an interrupt may reach before it knows the worker.
        if not hasattr(own, "worker"):
            with starting:
                if ended:
                    raise CancelledError
                own.worker = _Worker()
                workers.append(own.worker)
        worker: _Worker = own.worker
        return worker.compile(variant, target)

    pool = ThreadPoolExecutor(num_workers, "llmc-compile")
    try:
        jobs = {pool.submit(compile_one, variant): variant for variant in variants}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        with starting:
            ended = True
        # Stop the workers first: the pool's threads wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        pool.shutdown()


class _Worker:
    """A compiling process; used by one thread."""

    def __init__(self) -> None:
        # In its own process group, so that an interrupt from the terminal reaches only the compiler, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )

    def compile(self, variant: Variant, target: Target) -> bytes:
        spec, process = variant[0], self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, (*variant, target))
            code, error = _receive(process.stdout)
        except (EOFError, OSError):
            what = f"the process that compiled kernel {spec.symbol()} {_how_it_ended(process.wait())}"
            raise CompileError(f"{what}; compile again, with fewer jobs if memory is short") from None
        if error is not None:
            raise CompileError(f"kernel {spec.symbol()} cannot be compiled: {error}")
        return bytes(code)

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def serve() -> None:
    """Main loop of a worker: compiles what it is sent until its stdin closes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Keep output and reads of libraries out of the message stream.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with suppress(EOFError, BrokenPipeError):
        while True:
            spec, variant, target = _receive(requests)
            try:
                reply: tuple[bytes, str | None] = (target.compile(spec, variant), None)
            except Exception as error:
                reply = (b"", f"{type(error).__name__}: {' '.join(str(error).split())}")
            _send(replies, reply)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _send(pipe: IO[bytes], message: object) -> None:
    data = pickle.dumps(message)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other side is gone."""
    prefix = pipe.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    data = pipe.read(length)
    if len(prefix) < _LENGTH_BYTES or len(data) < length:
        raise EOFError
    return pickle.loads(data)
