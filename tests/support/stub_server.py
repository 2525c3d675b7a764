"""An OpenAI-shaped server of a few lines, which answers well or in one chosen wrong way: for tests of the client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FAULTS = ("none", "status", "torn", "no_done", "bad_json", "error_event", "no_tokens", "hang", "cut", "not_http")


@dataclass
class Stub:
    """fault: one of FAULTS, for every request whose index is a multiple of `every`. split: bytes of a chunk, 0: one
    event a chunk. What was asked is kept in `bodies`."""

    fault: str = "none"
    every: int = 1
    split: int = 0
    keep_alive: bool = True
    usage: bool = True
    miscount: int = 0
    delay_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 512, "vocab_size": 300})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    peak: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET" and path == "/v1/models":
                    self._plain(writer, 200, {"object": "list", "data": [{"id": "stub", **self.facts}]})
                else:
                    self.headers.append(headers)
                    await self._answer(writer, path, json.loads(body))
                await writer.drain()
                if not self.keep_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _plain(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{self._close()}\r\n".encode() + body)

    def _close(self) -> str:
        return "" if self.keep_alive else "Connection: close\r\n"

    async def _answer(self, writer: asyncio.StreamWriter, path: str, asked: dict[str, Any]) -> None:
        fault = self.fault if len(self.bodies) % self.every == 0 else "none"
        self.bodies.append(asked)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            if fault == "status":
                self._plain(writer, 429, {"error": {"message": "the queue is full", "type": "rate_limit"}})
                return
            if fault == "not_http":
                writer.write(b"hello\r\n\r\n")
                return
            if fault == "hang":
                await asyncio.sleep(3600)
            kind = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
            writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n{self._close()}\r\n".encode())
            stream = b"".join(self._events(path, asked, fault))
            if fault == "cut":
                writer.write(b"%x\r\n%s\r\n" % (len(stream) // 2, stream[: len(stream) // 2]))
                raise ConnectionError
            size = self.split or len(stream)
            for at in range(0, len(stream), size):
                part = stream[at : at + size]
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self.running -= 1

    def _events(self, path: str, asked: dict[str, Any], fault: str) -> Iterator[bytes]:
        chat = path.endswith("chat/completions")
        count = asked["max_tokens"]
        prompt: str | list[Any] = asked["messages"] if chat else asked["prompt"]
        if chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        yield b": a comment\n\n"
        for token in range(0 if fault == "no_tokens" else count):
            last = "length" if token == count - 1 else None
            word = {"delta": {"content": f"t{token} "}} if chat else {"text": f"t{token} "}
            yield _event({"choices": [{"index": 0, "finish_reason": last, **word}]})
            if fault == "error_event" and token == 1:
                yield _event({"error": {"message": "the engine stopped"}})
                return
            if fault == "torn" and token == 1:
                yield b'data: {"choi'
                return
        if fault == "bad_json":
            yield b"data: {nonsense\n\n"
        if self.usage and asked.get("stream_options", {}).get("include_usage"):
            counts = {"prompt_tokens": len(prompt), "completion_tokens": count + self.miscount}
            yield _event({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 2}}})
        if fault != "no_done":
            yield b"data: [DONE]\r\n\r\n"


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """Serves on a port of its own, in a thread."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.serve, "127.0.0.1", 0))
    stub.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:

        async def stop() -> None:
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
