"""`llmc chat` under a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

CHAT = [sys.executable, "-P", "-m", "llmc.cli.main", "chat"]
PATIENCE_S = 300  # only a hang takes that long


def escapes_removed(text: str) -> str:
    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>])", "", text)


class Terminal:
    """A chat under a terminal of 80 × 24."""

    def __init__(self, *arguments: str | Path) -> None:
        self._leader, follower = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        environment.pop("LLMC_API_KEY", None)

        def own_terminal() -> None:
            # Ctrl-C reaches the process only through a terminal that controls it.
            import fcntl
            import termios

            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*CHAT, *map(str, arguments)],
            stdin=follower, stdout=follower, stderr=follower, env=environment, preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(follower)
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until `text` is shown after what was waited for before; returns everything up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := escapes_removed(self.shown).find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.shown!r}"
            if not self._read():
                raise AssertionError(f"the chat ended before {text!r}: {self.shown!r}")
        start, self._seen = self._seen, at + len(text)
        return escapes_removed(self.shown)[start : self._seen]

    def press_until(self, key: str, text: str) -> None:
        """Presses a key until `text` is shown: Python forgets a signal that comes just before readline waits."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in escapes_removed(self.shown)[self._seen :]:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.shown!r}"
            self.type(key)
            while text not in escapes_removed(self.shown)[self._seen :]:
                if not select.select([self._leader], [], [], 1.0)[0]:
                    break
                assert self._read(), f"the chat ended before {text!r}: {self.shown!r}"
        self.wait_for(text)

    def ask(self, text: str) -> None:
        """Types a line at the prompt."""
        self.wait_for("> ")
        self.type(text + "\r")

    def wait_end(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._leader], [], [], PATIENCE_S)
        assert ready, f"nothing more after {self.shown!r}"
        try:
            chunk = os.read(self._leader, 65536)
        except OSError:  # Linux ends a terminal that nobody holds open any more with an error
            return False
        self.shown += chunk.decode("utf-8", "replace")
        return bool(chunk)
