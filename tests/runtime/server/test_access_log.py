"""The access log and recorded traces: one true line a request, and no text unless asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.buckets.trace import read_trace
from llmc.runtime.params import SamplingParams
from llmc.runtime.server.access_log import AccessLog, format_line
from llmc.runtime.server.exchanges import Exchange, Exchanges
from llmc.runtime.server.line_file import LineFile
from llmc.runtime.server.requests import EngineRequest, RequestRecord
from llmc.runtime.server.trace_recorder import PREFIX_BLOCK, TraceFileError, TraceRecorder

from support.full_disk import room_for
from support.server_harness import Running, running_server, slow_down, until

MS = 1_000_000
SECRET = "the cat sat on the mat"
RECORD = RequestRecord("r", 100 * MS, 102 * MS, 110 * MS, 190 * MS, 20, 16, 9, ("stop",))


def exchange(**values: Any) -> Exchange:
    made = Exchange("127.0.0.1", "POST", "/v1/completions", request_id="abc", started_ns=MS)
    made.ended_ns = 100 * MS
    for name, value in values.items():
        setattr(made, name, value)
    return made


def logged_exchanges(path: Path) -> tuple[AccessLog, Exchanges]:
    log, exchanges = AccessLog(path), Exchanges()
    exchanges.on_done.append(log.write)
    return log, exchanges


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_line_of_a_request() -> None:
    line = json.loads(format_line(exchange(status=200, model="tiny", records=[RECORD])))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "request_id": "abc", "client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200,
        "model": "tiny", "prompt_tokens": 20, "cached_tokens": 16, "output_tokens": 9, "finish_reasons": ["stop"],
        "queue_ms": 2.0, "ttft_ms": 10.0, "total_ms": 99.0,
    }  # fmt: skip


def test_several_prompts_are_summed_and_times_are_of_the_slowest() -> None:
    slow = replace(RECORD, first_scheduled_ns=150 * MS, first_token_ns=0, finish_reasons=("cancelled",), error="why")
    line = json.loads(format_line(exchange(records=[RECORD, slow])))
    assert (line["prompt_tokens"], line["output_tokens"]) == (40, 18)
    assert (line["queue_ms"], line["ttft_ms"]) == (50.0, 10.0)
    assert line["finish_reasons"] == ["stop", "cancelled"]
    assert line["error"] == "why"
    assert line["status"] is None


@pytest.mark.parametrize("bad", ['\n{"forged":1}', "\r\x00\x1b[2J", "\x7f\x85\u2028\u2029", "é\ud800", '"}'])
def test_no_text_of_a_client_can_forge_a_line(bad: str) -> None:
    text = format_line(exchange(path=f"/{bad}", request_id=bad, model=bad, method=bad, prompts=[bad]))
    assert text.isascii()
    assert text.isprintable()
    line = json.loads(text)
    assert (line["path"], line["request_id"], line["model"], line["prompts"]) == (f"/{bad}", bad, bad, [bad])


def test_long_fields_are_cut() -> None:
    assert len(format_line(exchange(path="/" + "x" * 100_000, request_id="y" * 100_000, model="z" * 100_000))) < 5000


def test_a_line_waits_for_response_and_engine(tmp_path: Path) -> None:
    for response_first in (True, False):
        path = tmp_path / f"{response_first}.log"
        log, exchanges = logged_exchanges(path)
        one = Exchange("c", "POST", "/v1/completions")
        exchanges.track(one, "r")
        steps: list[Callable[[], None]] = [partial(exchanges.end, one), partial(exchanges.on_record, RECORD)]
        first, second = steps if response_first else reversed(steps)
        first()
        assert path.read_text() == ""
        second()
        assert [line["output_tokens"] for line in lines_of(path)] == [9]
        log.close()


def test_requests_of_one_id_get_a_line_each(tmp_path: Path) -> None:
    _, exchanges = logged_exchanges(tmp_path / "log")
    two = [Exchange("c", "POST", "/v1/completions") for _ in range(2)]
    for one in two:
        exchanges.track(one, "r")
    for one in two:
        exchanges.on_record(RECORD)
        exchanges.end(one)
    assert len(lines_of(tmp_path / "log")) == 2


def test_closing_writes_what_the_engine_never_finished(tmp_path: Path) -> None:
    _, exchanges = logged_exchanges(tmp_path / "log")
    one = Exchange("c", "POST", "/v1/completions", request_id="lost")
    exchanges.track(one, "r")
    exchanges.end(one)
    exchanges.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log")] == ["lost"]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_reopening_follows_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LineFile(path)
    file.write("one")
    path.rename(tmp_path / "log.old")
    file.write("two")
    file.reopen()
    file.write("three")
    file.close()
    assert (tmp_path / "log.old").read_text() == "one\ntwo\n"
    assert path.read_text() == "three\n"


def test_rotation_by_size_keeps_whole_lines_and_headers(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    file = LineFile(path, max_bytes=40, header="HEAD")
    for number in range(20):
        file.write(f"line {number:04}")
    file.close()
    for part in (path, tmp_path / "trace.1"):
        assert part.stat().st_size <= 40
        assert re.fullmatch(r"HEAD\n(line \d{4}\n)+", part.read_text())
    assert path.read_text().endswith("line 0019\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_costs_lines_and_no_requests(capfd: pytest.CaptureFixture[str]) -> None:
    file = LineFile(Path("/dev/full"))
    file.write("one")
    file.write("two")
    assert file.num_dropped == 2
    assert capfd.readouterr().err.count("cannot write to /dev/full") == 1


def test_no_part_of_a_line_stays_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file, other = LineFile(path), LineFile(path)
    file.write("x" * 4000)
    with room_for(4096):
        for _ in range(3):
            file.write("a" * 200)
            other.write("b" * 200)
        file.write("short")
    file.write("last")
    assert path.read_text() == "x" * 4000 + "\nshort\nlast\n"
    assert (file.num_dropped, other.num_dropped) == (3, 3)


def test_a_part_that_cannot_be_taken_back_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    file = LineFile(path)
    file.write("x" * 4000)
    with monkeypatch.context() as patch, room_for(4096):
        patch.setattr("os.ftruncate", lambda *_: os.close(-1))
        file.write("a" * 200)
    with room_for(4099):  # this part can be taken back, the one before it still cannot
        file.write("b" * 200)
    file.write("last")
    assert [len(line) for line in path.read_text().splitlines()] == [4000, 95, 4]


def test_a_trace_can_be_read_after_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with room_for(8), pytest.raises(OSError, match="too large"):
        TraceRecorder(path)
    recorder = TraceRecorder(path)
    with room_for(path.stat().st_size + 130):
        for _ in range(4):
            recorder.on_record(RECORD)
    path.rename(tmp_path / "old.jsonl")
    with room_for(8):
        recorder.reopen()
        recorder.on_record(RECORD)
    recorder.on_record(RECORD)
    recorder.close()
    assert len(read_trace(tmp_path / "old.jsonl")) == 1
    assert len(read_trace(path)) == 1


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        AccessLog(tmp_path / "missing" / "log")


# ---- through the server ----------------------------------------------------------------------------------------------


def logged(path: Path, request_id: str) -> dict[str, Any]:
    """The line of a request, once it is written."""
    until(lambda: f'"request_id":"{request_id}"' in path.read_text())
    found = [line for line in lines_of(path) if line["request_id"] == request_id]
    assert len(found) == 1
    return found[0]


def post(running: Running, path: str, request_id: str, **body: Any) -> httpx.Response:
    return running.client.post(path, json=body, headers={"X-Request-Id": request_id, "Authorization": "Bearer hush"})


def test_lines_of_a_server(english_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with running_server(english_artifact, access_log=True, access_log_file=path, api_keys=("hush",)) as running:
        post(running, "/v1/completions?api_key=hush", "one", prompt=SECRET, max_tokens=5, ignore_eos=True)
        line = logged(path, "one")
        assert (line["path"], line["status"], line["model"]) == ("/v1/completions", 200, "tiny")
        assert (line["output_tokens"], line["finish_reasons"]) == (5, ["length"])
        assert line["prompt_tokens"] == len(running.engine.tokenizer.encode(SECRET))  # type: ignore[union-attr]
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]

        post(running, "/v1/completions", "many", prompt=[SECRET, SECRET], max_tokens=3, n=2, ignore_eos=True)
        line = logged(path, "many")
        assert (line["output_tokens"], line["finish_reasons"]) == (12, ["length"] * 4)

        with running.client.stream(
            "POST",
            "/v1/completions",
            json={"prompt": SECRET, "max_tokens": 4, "stream": True, "ignore_eos": True},
            headers={"X-Request-Id": "stream", "Authorization": "Bearer hush"},
        ) as response:
            response.read()
        assert logged(path, "stream")["output_tokens"] == 4

        post(running, "/v1/completions", "wrong", prompt=SECRET, max_tokens=-1)
        line = logged(path, "wrong")
        assert line["status"] == 400
        assert "output_tokens" not in line
        post(running, "/v1/nothing", "nowhere")
        assert logged(path, "nowhere")["status"] == 404
        running.client.post("/v1/completions", json={}, headers={"X-Request-Id": "stranger"})
        assert logged(path, "stranger")["status"] == 401
        paths = {line["path"] for line in lines_of(path)}
        assert not paths & {"/", "/health", "/ready", "/metrics", "/v1/llmc/state", "/v1/llmc/requests"}
    text = path.read_text()
    assert "cat" not in text
    assert "hush" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_server_answers_on_a_full_disk(
    english_artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for path in (tmp_path / "access.log", Path("/dev/full")):
        with running_server(english_artifact, access_log=True, access_log_file=path) as running:
            answers = [
                post(running, "/v1/completions", name, prompt=SECRET, max_tokens=8, temperature=0) for name in "ab"
            ]
            texts.append([answer.raise_for_status().json()["choices"] for answer in answers])
    assert texts[0] == texts[1]
    assert capfd.readouterr().err.count("cannot write to /dev/full") == 1


def test_a_client_that_leaves_is_logged_as_cancelled(
    english_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.log"
    with running_server(english_artifact, access_log=True, access_log_file=path) as running:
        slow_down(running.engine, monkeypatch)
        body = {"prompt": SECRET, "max_tokens": 480, "stream": True, "ignore_eos": True, "n": 8}
        request_id = {"X-Request-Id": "gone"}
        with running.client.stream("POST", "/v1/completions", json=body, headers=request_id) as response:
            lines = response.iter_lines()
            next(lines)
        line = logged(path, "gone")
        assert line["finish_reasons"] == ["cancelled"] * 8
        assert 0 < line["output_tokens"] < 480 * 8


def test_prompts_are_logged_on_request_only(english_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with running_server(english_artifact, access_log=True, access_log_file=path, log_prompts=True) as running:
        post(running, "/v1/completions", "one", prompt=SECRET, max_tokens=1)
        prompts = logged(path, "one")["prompts"]
    assert len(prompts) == 1
    assert SECRET in prompts[0]


def test_hangup_reopens_the_files(english_artifact: Path, tmp_path: Path) -> None:
    path, trace = tmp_path / "access.log", tmp_path / "trace.jsonl"
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "serve", str(english_artifact), "--port", "0", "--threads"]
    command += ["1", "--no-pin", "--access-log-file", str(path), "--record-trace", str(trace)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "llmc: ready" not in said:
                line = process.stderr.readline()
                assert line, f"the server ended: {said}"
                said += line
            url = said.split("llmc: ready")[1].split(" at ")[1].strip()
            body = {"prompt": SECRET, "max_tokens": 1}
            httpx.post(f"{url}/completions", json=body, timeout=300).raise_for_status()
            until(lambda: path.read_text() != "")
            path.rename(tmp_path / "old.log")
            trace.rename(tmp_path / "old.jsonl")
            os.kill(process.pid, signal.SIGHUP)
            until(lambda: path.exists() and trace.exists())
            httpx.post(f"{url}/completions", json=body, timeout=300).raise_for_status()
            until(lambda: path.read_text() != "")
        finally:
            process.terminate()
        process.communicate(timeout=300)
    assert len(lines_of(tmp_path / "old.log")) == len(lines_of(path)) == 1
    assert len(read_trace(trace)) == len(read_trace(tmp_path / "old.jsonl")) == 1


# ---- traces ----------------------------------------------------------------------------------------------------------


def submit(recorder: TraceRecorder, request_id: str, prompt: list[int], **record: Any) -> None:
    recorder.on_submit(EngineRequest(request_id, tuple(prompt), SamplingParams()))
    recorder.on_record(replace(RECORD, request_id=request_id, num_prompt_tokens=len(prompt), **record))


def test_trace_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    shared = list(range(2 * PREFIX_BLOCK))
    submit(recorder, "a", [*shared, 1, 2], arrival_ns=1_000 * MS)
    submit(recorder, "b", [*shared, 3], arrival_ns=1_500 * MS, num_output_tokens=7, finish_reasons=("stop", "length"))
    submit(recorder, "c", [9, *shared[1:]], arrival_ns=2_000 * MS)
    submit(recorder, "d", [1, 2, 3], arrival_ns=3_000 * MS, finish_reasons=("cancelled",))
    recorder.close()
    trace = read_trace(path)
    assert trace.prefix_block == PREFIX_BLOCK
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.5, 1, 2], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [258, 257, 256, 3]
    assert trace.output_tokens.tolist() == [9, 4, 9, 9]
    a, b, c, d = (trace.prefix_of(index).tolist() for index in range(4))
    assert len(a) == 2
    assert a == b
    assert not set(a) & set(c)
    assert d == []


def test_what_got_no_token_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    for reason in ("cancelled", "timeout", "error"):
        submit(recorder, reason, [1] * 300, num_output_tokens=0, finish_reasons=(reason,))
    submit(recorder, "ok", [1], num_output_tokens=0, finish_reasons=("stop",))
    recorder.close()
    assert read_trace(path).output_tokens.tolist() == [0]


def test_trace_grows_by_runs_and_rotates(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        recorder = TraceRecorder(path)
        submit(recorder, "r", [1, 2])
        recorder.close()
    assert len(read_trace(path)) == 2
    recorder = TraceRecorder(path, max_bytes=400)
    for _ in range(10):
        submit(recorder, "r", [1, 2])
    recorder.close()
    rotated = path.with_name("trace.jsonl.1")
    assert path.stat().st_size <= 400
    assert 0 < len(read_trace(path)) <= 5
    assert 0 < len(read_trace(rotated)) <= 5


def test_trace_is_not_written_into_another_file(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("To be, or not to be\n")
    with pytest.raises(TraceFileError, match="is not a trace"):
        TraceRecorder(path)
    assert path.read_text() == "To be, or not to be\n"


def test_trace_of_a_server(english_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with running_server(english_artifact, record_trace=path) as running:
        lengths = []
        for count in (3, 5):
            usage = running.complete(SECRET * count, max_tokens=count, ignore_eos=True)["usage"]
            lengths.append((usage["prompt_tokens"], usage["completion_tokens"]))
    trace = read_trace(path)
    assert list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == lengths
    assert "cat" not in path.read_text()
