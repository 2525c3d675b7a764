"""A process of `llmc serve`: start, read its output, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from llmc.runtime.die_with_parent import dying_with_this_process

SERVE = (sys.executable, "-P", "-m", "llmc.cli.main", "serve")
"""The command; flags and artifact are appended."""
_LOG_FILE = "--access-log-file"
_READY = re.compile(r"llmc: ready: .* at (https?://\S+)/v1")
_MAX_LINE = 1 << 16
_HURRY_S, _LOOK_S = 5.0, 0.05
_USAGE = 2
"""Exit code of `llmc serve` for a wrong command line."""


def without_access_log(flags: Sequence[str]) -> list[str]:
    """The flag that keeps the access log off the standard output, which nobody reads. None where `flags` name a file
    for it."""
    named = any(flag.partition("=")[0] == _LOG_FILE for flag in flags)
    return [] if named else ["--no-access-log"]


class ServedProcess:
    """It gets SIGTERM when this process dies. on_line: gets each line of its stderr. on_url: gets its address.
    environment: variables besides those of this process."""

    def __init__(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        on_url: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._on_line, self._on_url = command, on_line, on_url
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def refused(self) -> bool:
        """Whether it has ended because of its command line, so that another start would end the same way."""
        return self._process is not None and self._process.returncode == _USAGE

    async def start(self) -> None:
        """Starts it; call once."""
        self._process = await asyncio.create_subprocess_exec(
            *dying_with_this_process(self._command, signal.SIGTERM),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            env=self._environment,
            start_new_session=True,  # Ctrl+C goes to the parent, which lets it finish its requests
        )

    async def ended(self) -> str:
        """Reads its lines until it ends; returns how it ended. Kills it if the reading task is cancelled."""
        process = self._process
        assert process is not None
        assert process.stderr is not None
        try:
            while True:
                try:
                    line = await process.stderr.readline()
                except ValueError:  # longer than any line of ours
                    continue
                if not line:
                    break
                text = line.decode("utf-8", "replace").rstrip()
                self._on_line(text)
                if found := _READY.search(text):
                    self._on_url(found[1])
            code = await process.wait()
        except asyncio.CancelledError:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            raise
        return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def stop(self, most_s: float, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """Lets it finish its requests; kills it after most_s seconds. in_a_hurry: whether it must end at once instead,
        asked again and again."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended = asyncio.create_task(process.wait())
        end, hurried = time.monotonic() + most_s, False
        while not ended.done() and (left := end - time.monotonic()) > 0:
            if in_a_hurry() and not hurried:
                hurried, end = True, min(end, time.monotonic() + _HURRY_S)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)  # a second SIGTERM might be taken for the first
            await asyncio.wait({ended}, timeout=min(left, _LOOK_S))
        with contextlib.suppress(ProcessLookupError):
            if not ended.done():
                process.kill()
        await ended
