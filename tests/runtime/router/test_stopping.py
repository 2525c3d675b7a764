"""Signals to the router: what runs ends as its client expects, and what is new is refused."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live_router import PATIENCE_S, LiveRouter, routing

PROMPT = "It is a truth universally acknowledged, that"
LONG = {"prompt": [PROMPT] * 64, "n": 16, "max_tokens": 480, "ignore_eos": True}  # runs for minutes
PATH = "/v1/completions"


@contextmanager
def streaming(router: LiveRouter, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with httpx.stream("POST", router.url + PATH, json={**body, "stream": True}, timeout=PATIENCE_S) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def ends_with_an_error(lines: Iterator[str]) -> bool:
    *_, event, done = lines
    return done == "data: [DONE]" and json.loads(event.removeprefix("data: "))["error"]["code"] == "draining"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_everything(english_artifact: Path, name: str) -> None:
    sent = getattr(signal, name)
    with routing("--spawn", "1", english_artifact, "--drain-timeout", "3000") as router:
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(router.url + PATH, json=LONG, timeout=PATIENCE_S))
        )
        with streaming(router, LONG) as lines:
            asking.start()
            router.until(lambda: router.replicas()["r0"]["active_requests"] == 2)
            (pid,) = (one["pid"] for one in router.replicas().values())
            router.process.send_signal(sent)
            router.until(lambda: "2 requests running, up to 3000 s to finish\n" in "".join(router.log))
            for method, path in (("POST", PATH), ("GET", "/health"), ("GET", "/ready")):
                refused = httpx.request(method, router.url + path, timeout=PATIENCE_S)
                assert refused.status_code == 503, path
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["connection"] == "close"
                assert refused.json().get("status", "draining") == "draining"
            assert next(lines), "what runs goes on"
            router.process.send_signal(sent)
            assert ends_with_an_error(lines)
        asking.join(PATIENCE_S)
        assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(503, "draining")]
        assert router.process.wait(PATIENCE_S) == 0
        assert not Path(f"/proc/{pid}").exists()
    log = "".join(router.log)
    assert f"llmc: stopping: {'SIGTERM' if name == 'SIGTERM' else 'Ctrl+C (SIGINT)'}; 2 requests running" in log
    assert "llmc: stopping at once: a second signal; 2 requests cancelled\n" in log
    assert "Traceback" not in log


def test_what_runs_longer_than_the_drain_is_cancelled(english_artifact: Path) -> None:
    with routing("--spawn", "1", english_artifact, "--drain-timeout", "0") as router, streaming(router, LONG) as lines:
        router.process.terminate()
        assert ends_with_an_error(lines)
        assert router.process.wait(PATIENCE_S) == 0
    log = "".join(router.log)
    assert "llmc: stopping: SIGTERM; 1 request running, up to 0 s to finish\n" in log
    assert "llmc: 1 request cancelled after " in log
    assert "Traceback" not in log


def test_a_stream_finishes(english_artifact: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    with routing("--spawn", "1", english_artifact) as router, streaming(router, body) as lines:
        router.process.terminate()
        *_, last, done = lines
        assert ('"finish_reason":"length"' in last, done) == (True, "data: [DONE]")
        assert router.process.wait(PATIENCE_S) == 0
    assert "llmc: stopping: SIGTERM; 1 request running, up to 30 s to finish\n" in "".join(router.log)
