"""`llmc buckets replan`: of a server or a trace, and what is no such thing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.main import main

from support.artifacts import TinyArtifact

STEP = {"phase": "decode", "sequences": 2, "tokens": 2, "samples": 2, "context": 64, "bucket": "decode:8x256",
        "steps": 900.0, "seconds": 0.004}  # fmt: skip
GRAPHS = ["prefill:1x256", "decode:8x256", "decode:1x256"]
STATE: dict[str, Any] = {
    "mode": "auto", "unit": "time", "max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "padding": "computed",
    "observed_s": 60.0, "on": GRAPHS, "off": [], "steps": [STEP, STEP | {"sequences": 1, "tokens": 1, "samples": 1,
    "bucket": "decode:1x256", "seconds": 0.001}, STEP | {"sequences": 3, "tokens": 3, "samples": 3, "bucket": None,
    "seconds": 0.0}],
    "graphs": [{"bucket": one, "arena_bytes": 1000, "command_bytes": 500, "row_unit": None} for one in GRAPHS],
    "decisions": [{"time": 1.0, "kind": "kept", "added": ["decode:1x256"], "retired": [], "reason": "it paid"}],
}  # fmt: skip


@contextmanager
def answering(answer: Callable[[str, str | None], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str | None]] = []

    def answer(path: str, key: str | None) -> tuple[int, bytes]:
        asked.append((path, key))
        return 200, json.dumps(STATE).encode()

    with answering(answer) as url:
        assert main(["buckets", "replan", "--url", f"{url}/v1", "--api-key", "hush"]) == 0
        text = capsys.readouterr().out
        assert main(["buckets", "replan", "--url", url.removeprefix("http://"), "--json", "--max-added", "1"]) == 0
        data = json.loads(capsys.readouterr().out)
    assert asked[0] == ("/v1/llmc/replan?steps=true", "Bearer hush")
    assert asked[1][1] is None
    assert "add     decode:" in text
    assert "+decode:1x256  it paid" in text
    assert [change["action"] for change in data["changes"]] == ["add"]
    assert data["changes"][0]["bytes"] == 500
    assert data["seconds_then"] < data["seconds_now"]
    assert "steps" not in data["server"]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (404, b"{}", "start it with --replan suggest"),
        (401, b"{}", "it wants a key: give --api-key"),
        (500, b"{}", "it answered 500"),
        (200, b"<html>", "does not tell of steps as llmc serve does"),
        (200, b"[]", "does not tell of steps"),
        (200, json.dumps(STATE | {"steps": [STEP | {"sequences": -1}]}).encode(), "does not tell of steps"),
        (200, json.dumps(STATE | {"steps": [STEP | {"phase": "x"}]}).encode(), "does not tell of steps"),
        (200, json.dumps(STATE | {"block_size": 0}).encode(), "does not tell of steps"),
        (200, json.dumps(STATE | {"graphs": [{}]}).encode(), "does not tell of steps"),
    ],
)
def test_what_is_no_such_server(status: int, content: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda *_: (status, content)) as url:
        assert main(["buckets", "replan", "--url", url]) == 1
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert message in errors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --url URL, or ARTIFACT and --trace FILE"),
        (["--trace", "t"], 2, "give --url URL"),
        (["a", "--url", "http://x"], 2, "give --url URL"),
        (["--url", "ftp://x"], 1, "is not the address of a server"),
        (["--url", "http://127.0.0.1:9"], 1, "does not answer"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "replan", *arguments]) == code
    assert message in capsys.readouterr().err


def test_of_a_trace(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"arrival_s": 0.1 * n, "prompt_tokens": 3 + n % 7, "output_tokens": 9} for n in range(80))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["buckets", "replan", str(tiny_artifact.artifact), "--trace", str(trace)]
    assert main([*arguments, "--cost", "tokens", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] > 300
    assert data["unit"] == "tokens"
    assert data["padding_then"] <= data["padding_now"]
    assert main([*arguments, "--cost", "tokens", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == data
