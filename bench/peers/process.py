"""Workers and servers as processes of their own, each the leader of a process group."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """Raised with one sentence: what went wrong in a peer's process."""


@dataclass(frozen=True)
class Command:
    """A process to start: arguments, additions to the environment, and seconds to wait until it is ready.

    ready_path: path at which a server answers 200 once it is ready.
    """

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    ready_s: float = 600.0
    ready_path: str = "/health"


def last_line(path: Path) -> str:
    """The last line of a log that is not blank, for error messages."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        for line in reversed(lines):
            if "Error" in line or "error" in line:
                return line[:300]
        if lines:
            return lines[-1][:300]
    return "it wrote nothing"


def start(command: Command, log: Path, **pipes: Any) -> subprocess.Popen[str]:
    """Starts a process as leader of a new group; its stderr is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **command.environment}
    with log.open("a") as errors:
        errors.write(f"\n$ {' '.join(command.argv)}\n")
        errors.flush()
        try:
            return subprocess.Popen(
                command.argv, env=environment, stderr=errors, text=True, start_new_session=True, **pipes
            )
        except OSError as error:
            raise PeerError(f"{command.argv[0]} does not start: {error.strerror}") from error


def end(process: subprocess.Popen[str], seconds: float = 20.0) -> None:
    """Ends a process and all of its group, by force after `seconds`."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        _signal(process, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    # Also processes that outlive their leader.
    _signal(process, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class Worker:
    """A worker script (workers/worker.py) with its model loaded.

    It is stopped between requests: spinning idle threads would slow the others down. Raises PeerError if it does not
    get ready. `ask` raises PeerError, too; `alive` then tells whether the worker still runs.
    """

    def __init__(self, command: Command, log: Path, *, wait: bool = True) -> None:
        self.log = log
        self._buffer = b""
        self.began = time.perf_counter()
        self.process = start(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.version, self.details = "", {}  # type: str, dict[str, Any]
        self._ready_s = command.ready_s
        if wait:
            self.wait_ready()
            self.sleep()

    def wait_ready(self) -> None:
        """Waits until the model is loaded."""
        try:
            answer = self.read(self._ready_s)
        except BaseException:
            self.close()
            raise
        self.version, self.details = answer["version"], answer["details"]

    def ask(self, timeout_s: float = 600.0, **request: Any) -> dict[str, Any]:
        """Wakes the worker, sends one request, and returns its answer."""
        self.send(**request)
        try:
            return self.read(timeout_s)
        finally:
            self.sleep()

    def send(self, **request: Any) -> None:
        _signal(self.process, signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PeerError(f"its process ended: {last_line(self.log)}") from error

    def sleep(self) -> None:
        _signal(self.process, signal.SIGSTOP)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        end(self.process)

    def readable(self, seconds: float) -> bool:
        """Whether output came or the process ended within `seconds`."""
        assert self.process.stdout is not None
        return b"\n" in self._buffer or bool(select.select([self.process.stdout], [], [], seconds)[0])

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Returns the next answer."""
        assert self.process.stdout is not None
        descriptor, deadline = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                end(self.process)
                raise PeerError(f"it gave no answer within {timeout_s:.0f} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                end(self.process)
                raise PeerError(f"its process ended with {self.process.returncode}: {last_line(self.log)}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer


@contextlib.contextmanager
def server(command: Command, url: str, log: Path) -> Iterator[None]:
    """Context with a server that is ready at `url`. Raises PeerError."""
    host = url.removeprefix("http://")
    process = start(command, log, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + command.ready_s
        while True:
            if process.poll() is not None:
                raise PeerError(f"its server ended with {process.returncode}: {last_line(log)}")
            if time.monotonic() > deadline:
                raise PeerError(f"its server was not ready within {command.ready_s:.0f} s")
            connection = http.client.HTTPConnection(host, timeout=5)
            try:
                connection.request("GET", command.ready_path)
                if connection.getresponse().status == 200:
                    break
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        yield
    finally:
        end(process)
