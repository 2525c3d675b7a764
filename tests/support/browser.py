"""A headless Chromium, driven over the DevTools protocol; for tests of the live page."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

_PATIENCE_S = 300  # only a hang takes that long
_FLAGS = (  # noqa: SIM905 (a list of one flag a line is no easier to read)
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-default-apps --hide-scrollbars "
    "--disable-dev-shm-usage --remote-debugging-port=0"
).split()


def chromium() -> str | None:
    """The program, when there is one."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """One page of a fresh profile; `errors` holds what it complained about, `requests` the addresses it asked for."""

    def __init__(self, program: str, profile: Path, width: int = 1360, height: int = 900) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._stack = contextlib.ExitStack()
        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = self._port(profile / "DevToolsActivePort")
            request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
                address = json.load(response)["webSocketDebuggerUrl"]
            self._socket = self._stack.enter_context(
                connect(address, max_size=None, open_timeout=_PATIENCE_S, ping_interval=None)
            )
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(Exception):
            self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; what happens meanwhile is noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_PATIENCE_S))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str, timeout_s: float = _PATIENCE_S) -> None:
        """Waits until the expression is truthy; the limit is for pages that hang."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.evaluate(f"Boolean({expression})"):
                return
            time.sleep(0.05)
        raise TimeoutError(
            f"{expression} never became true; the page shows: {self.evaluate('document.body.innerText')}"
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def _port(self, file: Path) -> int:
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            if file.is_file() and (lines := file.read_text().split()):
                return int(lines[0])
            time.sleep(0.05)
        raise RuntimeError("chromium did not open its debugging port")
