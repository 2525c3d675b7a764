"""Attacks on a server: what a refusal looks like, and that the server goes on after each."""

from __future__ import annotations

import json
from typing import Any

from support.live_server import LiveServer

HOST = b"Host: localhost\r\n"
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
CHUNKED = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def check_alive(server: LiveServer) -> None:
    assert server.process.poll() is None, "".join(server.log)
    assert server.ask("GET", "/health").json() == {"status": "ok"}
    assert server.ask("GET", "/ready").status == 200
    answer = server.ask("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2, "temperature": 0})
    assert answer.status == 200, answer.content


def check_refused(status: int, content: bytes) -> dict[str, Any]:
    """The error of an answer that must be a 4xx in OpenAI's shape."""
    assert 400 <= status < 500, (status, content[:300])
    body = json.loads(content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000, "an error does not echo what it got"
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return dict(error)


def parse_raw(received: bytes) -> tuple[int, bytes]:
    """Status and content of the first answer; interim ones, which a busy server sends, are skipped."""
    head, _, content = received.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    return parse_raw(content) if status < 200 else (status, content)


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and content of what is answered to a POST."""
    answer = server.ask("POST", path, body)
    return answer.status, answer.content
