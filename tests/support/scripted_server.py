"""A server of scripted answers, for tests of `llmc chat`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MARKDOWN = (
    "# Title\n\nSome *slanted* text.\n\n1. one\n\n2. two\n\n```python\nprint('<b>')\n\n# no title\n```\n\nThe end."
)
ANSWERS = {"markdown": MARKDOWN, "evil": "a\x1b]0;title\x07b\x9b2Jc\u202ed", "html": "see <div>this</div>"}


class ScriptedServer(ThreadingHTTPServer):
    """Speaks enough of the OpenAI API; keeps what it was asked.

    A question that is a key of ANSWERS gets that answer, two characters an event; "endless" one that never ends; any
    other is echoed. max_model_len: words that a prompt may have, a token each, None for no limit. counts: whether it
    has /tokenize. template: whether the model has a chat template.
    """

    daemon_threads = True

    def __init__(self, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.max_model_len: int | None = None
        self.counts = False
        self.template = True
        self.asked: list[dict[str, Any]] = []
        self.disconnected = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and not self.server.counts:
            self._json(404, {"detail": "Not Found"})
            return
        if self.path != "/tokenize":
            self.server.asked.append(body)
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._json(401, {"error": {"message": "the API key is wrong", "type": "x", "param": None, "code": None}})
            return
        chat = "messages" in body
        if chat and not self.server.template:
            message = "this model has no default chat template: use plain prompts, without chat"
            self._json(400, {"error": {"message": message, "type": "x", "param": None, "code": "chat_template"}})
            return
        contents = [message["content"] for message in body["messages"]] if chat else [body["prompt"]]
        num_tokens, limit = len(" ".join(contents).split()), self.server.max_model_len
        if self.path == "/tokenize":
            self._json(200, {"count": num_tokens, "max_model_len": limit or 1 << 20})
            return
        if limit is not None and num_tokens + body.get("max_tokens", 1) > limit:
            error = {"message": "too long", "type": "x", "param": "prompt", "code": "context_length_exceeded"}
            self._json(400, {"error": error})
            return
        question = contents[-1]
        if question == "refuse":
            self._json(
                400, {"error": {"message": "max_tokens 9 is too much", "type": "x", "param": None, "code": None}}
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if question == "think":
                self._event({"choices": [{"index": 0, "delta": {"reasoning_content": "hmm"}}]})
                self._event({"choices": [{"index": 0, "delta": {"reasoning": ", well"}}]})
            if question == "only think":
                self._event({"choices": [{"index": 0, "delta": {"reasoning_content": "hmm"}}]})
                self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
                return
            if question == "break":
                self._piece("half an ans", chat)
                self._event({"error": {"message": "the engine stopped", "type": "x", "param": None, "code": None}})
                return
            if question == "endless":
                while True:
                    self._piece("on and ", chat)
                    time.sleep(0.01)
            answer = ANSWERS.get(question, f"you said {question}")
            for i in range(0, len(answer), 2):
                self._piece(answer[i : i + 2], chat)
            self._event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 41}})
            self._chunk(b": a comment\n\ndata: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.server.disconnected.set()

    def _piece(self, text: str, chat: bool) -> None:
        self._event({"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]})

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """A server that runs in a thread."""
    server = ScriptedServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
