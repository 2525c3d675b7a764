"""A replica on a node: a process of `llmc serve`, which Ray starts, watches and ends by its actor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from llmc.runtime.deploy.registry import BEAT_S
from llmc.runtime.router.upstream import ReplicaLost, Upstream

log = logging.getLogger("llmc.deploy")
_READY = re.compile(r"llmc: ready: .* at (https?://\S+)/v1")
_WRAPPER = str(Path(__file__).parents[1] / "router" / "die_with_parent.py")
_MAX_LINE = 1 << 16
_LAST_LINES = 5
_GAUGE = re.compile(rb"^(llmc_(?:sequences_running|sequences_waiting|kv_blocks|kv_blocks_used)) (\S+)$", re.MULTILINE)
Beat = Callable[[str, bool], Awaitable[None]]
"""Says where it is: the URL, and whether it is leaving."""


class ServerDied(RuntimeError):
    """The process ended by itself; says its last lines."""


class Server:
    """The process, from its start to its end. headers: of questions about its metrics."""

    def __init__(self, artifact: str, flags: Sequence[str], host: str, key: str | None) -> None:
        self.url: str | None = None
        self._command = [
            sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()),
            sys.executable, "-P", "-m", "llmc.cli.main", "serve", artifact,
            "--host", host, "--port", "0", "--no-access-log", *flags,
        ]  # fmt: skip
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, beat: Beat) -> None:
        """Returns when it is ready, and says so by `beat` from then on. Raises ServerDied."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            start_new_session=True,
        )
        ready = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._read(ready)))
        await ready.wait()
        self.check()
        assert self.url is not None
        self._tasks.append(asyncio.create_task(self._beat(beat, self.url)))

    def check(self) -> None:
        """Raises ServerDied where it is no more."""
        process = self._process
        if process is None or process.returncode is None:
            return
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ServerDied(f"llmc serve {how}: {' / '.join(self._lines)}")

    async def load(self) -> dict[str, float]:
        """What the scaling goes by: `load`, requests that run or wait, and `kv_use`, the share of KV blocks in use."""
        if self.url is None:
            return {"load": 0.0, "kv_use": 0.0}
        try:
            answer = await Upstream(self.url).request("GET", b"/metrics", self._headers, b"")
            try:
                found = {name.decode(): float(value) for name, value in _GAUGE.findall(await answer.body())}
            finally:
                answer.close()
        except ReplicaLost:
            return {"load": 0.0, "kv_use": 0.0}
        running, waiting = (found.get(f"llmc_sequences_{state}", 0.0) for state in ("running", "waiting"))
        blocks, used = (found.get(name, 0.0) for name in ("llmc_kv_blocks", "llmc_kv_blocks_used"))
        return {"load": running + waiting, "kv_use": used / max(blocks, 1.0)}

    async def stop(self, beat: Beat, most_s: float) -> None:
        """Tells endpoints, lets running requests end, and kills what takes longer."""
        if self.url is not None:
            await beat(self.url, True)
            # An endpoint that has just asked asks again.
            await asyncio.sleep(2 * BEAT_S)
        for task in self._tasks[1:]:
            task.cancel()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), most_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()

    async def _read(self, ready: asyncio.Event) -> None:
        process = self._process
        assert process is not None
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than any of ours
                continue
            if not line:
                break
            text = line.decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            log.info("%s", text)
            if found := _READY.search(text):
                self.url = found[1]
                ready.set()
        await process.wait()
        ready.set()

    async def _beat(self, beat: Beat, url: str) -> None:
        process = self._process
        while process is not None and process.returncode is None:
            try:
                await beat(url, False)
            except Exception as error:  # the registry is being started again
                log.warning("the registry does not answer: %s", error)
            await asyncio.sleep(BEAT_S)
