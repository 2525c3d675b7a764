"""`llmc serve` as a process, for tests that talk to it as clients do."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 300  # only a hang takes that long


@dataclass(frozen=True)
class Answer:
    """What came back over a connection of its own."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class LiveServer:
    """A server that is ready; `log` is what it wrote to stdout and stderr so far."""

    process: subprocess.Popen[str]
    port: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request; a dictionary is sent as JSON. Status codes do not raise."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, content, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return Answer(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def send_raw(self, data: bytes, *, end: bool = True) -> bytes:
        """What the server answers to these bytes: with `end` all until it closes, as nothing more will come from here;
        without it the first answer."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            try:
                connection.sendall(data)
                if end:
                    connection.shutdown(socket.SHUT_WR)
                while (end or not _is_whole(received)) and (chunk := connection.recv(65536)):
                    received += chunk
            except TimeoutError:
                raise
            except OSError:
                # It closes while the rest is still on its way.
                pass
        return received


def _is_whole(received: bytes) -> bool:
    head, separator, content = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(separator) and (length is None or len(content) >= int(length[1]))


@contextmanager
def serving(
    artifact: Path, *flags: str | Path, launcher: Sequence[str] = (), fails: bool = False
) -> Iterator[LiveServer]:
    """A server of `artifact` that answers; ended by SIGTERM, which it must obey with exit code 0.

    launcher: what starts it, and its arguments. fails: it ends by itself, with another exit code.
    """
    command = [
        *launcher,
        sys.executable,
        "-P",
        "-m",
        "llmc.cli.main",
        "serve",
        str(artifact),
        "--port",
        "0",
        *map(str, flags),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    server = LiveServer(process)

    def read() -> None:
        assert process.stdout is not None
        server.log.extend(process.stdout)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"llmc: ready: .* at http://127\.0\.0\.1:(\d+)/v1", "".join(server.log))):
            assert process.poll() is None, f"the server ended: {''.join(server.log)}"
            assert time.monotonic() < deadline, f"the server is not ready: {''.join(server.log)}"
            time.sleep(0.02)
        server.port = int(found[1])
        yield server
        if not fails:
            process.terminate()
        assert (process.wait(PATIENCE_S) != 0) == fails, "".join(server.log)
    finally:
        process.kill()
        process.wait()
        reader.join()
