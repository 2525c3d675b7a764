"""`llmc bench serve` against a stub server, `llmc bench latency` and `throughput` on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import main as cli

from support.artifacts import TinyArtifact
from support.stub_server import Stub, serving


def bench(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    """The JSON result of a command."""
    capsys.readouterr()
    assert cli.main(["bench", *argv, "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence of a command that must fail."""
    capsys.readouterr()
    assert cli.main(["bench", *argv]) in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_exact_lengths_are_sent_and_verified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with serving(Stub(delay_s=0.05)) as stub:
        data = bench(
            capsys, "serve", "--url", stub.url, "--num-prompts", "20", "--input-len", "30", "--output-len", "6",
            "--range-ratio", "0.5", "--strict-in-out-len", "--concurrency", "3", "--goodput", "ttft:60000,e2e:60000",
            "--api-key", "secret", "--extra-body", '{"top_k": 2}', "--warmup", "2", "-o", str(file),
        )  # fmt: skip
        assert stub.peak == 3
        assert len(stub.bodies) == 22
        assert {headers["authorization"] for headers in stub.headers} == {"Bearer secret"}
    counted = stub.bodies[2:]
    assert len({len(body["prompt"]) for body in counted}) > 5
    assert all(15 <= len(body["prompt"]) <= 45 and 3 <= body["max_tokens"] <= 9 for body in counted)
    assert all(body["ignore_eos"] and body["top_k"] == 2 and body["model"] == "stub" for body in counted)
    assert stub.bodies[0]["prompt"] not in [body["prompt"] for body in counted], "the warm-up filled the cache"
    found = data["report"]
    assert (found["requests"], found["completed"], found["failures"], found["peak_concurrency"]) == (20, 20, {}, 3)
    assert found["input_tokens"] == sum(len(body["prompt"]) for body in counted)
    assert found["output_tokens"] == sum(body["max_tokens"] for body in counted)
    assert found["goodput"] == found["requests_per_s"] > 0
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        spread = found[metric]
        ranked = [spread[name] for name in ("min", "p50", "p90", "p95", "p99", "max")]
        assert ranked == sorted(ranked)
        assert {"mean", "std"} <= set(spread)
    assert found["ttft_ms"]["min"] > 0
    text = file.read_text()
    assert "secret" not in text
    written = json.loads(text)
    assert written["report"] == found
    assert sorted(len(one["token_ms"]) for one in written["requests"]) == sorted(body["max_tokens"] for body in counted)


def test_same_seed_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    for seed in ("1", "1", "2"):
        with serving(Stub()) as stub:
            bench(capsys, "serve", "--url", stub.url, "--num-prompts", "3", "--seed", seed, "--warmup", "0")
        asked.append(sorted(json.dumps(body) for body in stub.bodies))
    assert asked[0] == asked[1] != asked[2]


def test_table_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Stub(fault="status", every=4)) as stub:
        argv = ["bench", "serve", "--url", stub.url, "--num-prompts", "8", "--warmup", "0", "--goodput", "tpot:1e6"]
        assert cli.main(argv) == 0
    text = capsys.readouterr().out
    for part in ("6 completed, 2 failed", "output throughput", "peak concurrency", "goodput", "TTFT", "TPOT", "ITL",
                 "E2E", "p50", "p90", "p95", "p99", "2 × HTTP 429: the queue is full"):  # fmt: skip
        assert part in text, text


def test_a_run_without_one_answer_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serving(Stub(fault="status")) as stub:
        page = tmp_path / "report.html"
        argv = ("--num-prompts", "3", "--warmup", "0", "--html", str(page))
        data = bench(capsys, "serve", "--url", stub.url, *argv, code=1)
        assert data["report"]["failures"] == {"HTTP 429": 3}
        assert data["buckets"] is None
        for sentence in ("HTTP 429", "No request completed.", "The server does not tell of its buckets"):
            assert sentence in page.read_text(encoding="utf-8")
        assert "the first request failed with HTTP 429: the queue is full" in refused(
            capsys, "serve", "--url", stub.url
        )


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,40,6
2023-11-16 18:15:46.2000000,700,500
2023-11-16 18:15:47.0000000,50,4
"""


@pytest.mark.parametrize("form", ["azure", "mooncake"])
def test_traces_are_replayed(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if form == "azure":
        file = tmp_path / "trace.csv"
        file.write_text(AZURE)
    else:
        file = tmp_path / "trace.jsonl"
        rows = [(0, 40, 6, [0]), (200, 700, 500, [1, 2]), (1000, 50, 4, [0])]
        keys = ("timestamp", "input_length", "output_length", "hash_ids")
        file.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    with serving(Stub()) as stub:
        data = bench(
            capsys, "serve", "--url", stub.url, "--dataset", str(file), "--time-scale", "0.25", "--strict-in-out-len",
            "--warmup", "0", "--concurrency", "1", "-o", str(tmp_path / "result.json"),
        )  # fmt: skip
    assert [len(body["prompt"]) for body in stub.bodies] == [40, 256, 50]
    assert [body["max_tokens"] for body in stub.bodies] == [6, 256, 4]
    assert data["report"]["completed"] == 3
    assert data["notes"][0] == "1 of 3 requests were cut to the model's 512 tokens"
    written = json.loads((tmp_path / "result.json").read_text())["requests"]
    planned = [one["start_ms"] - one["lag_ms"] for one in written]
    assert [round(ms - planned[0]) for ms in planned] == [0, 50, 250]
    # Equal blocks of a Mooncake trace are equal tokens.
    assert (stub.bodies[0]["prompt"] == stub.bodies[2]["prompt"][:40]) == (form == "mooncake")


def test_prompt_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt_token_ids": [4, 5]}\n')
    with serving(Stub()) as stub:
        data = bench(capsys, "serve", "--url", stub.url, "--dataset", str(file), "--num-prompts", "3", "--rate", "500",
                     "--concurrency", "1", "--warmup", "0")  # fmt: skip
        assert data["report"]["completed"] == 3
        assert [body["prompt"] for body in stub.bodies] == ["hello", [4, 5], "hello"]
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with serving(Stub()) as stub:
        bench(capsys, "serve", "--url", stub.url, "--dataset", str(chats), "--endpoint", "chat", "--warmup", "0")
        assert [body["messages"][0]["content"] for body in stub.bodies] == ["hi"]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--goodput", "ttft"], "'ttft' is not METRIC:MS"),
        (["--goodput", "itl:3"], "'itl:3' is not METRIC:MS"),
        (["--goodput", "ttft:3", "--goodput", "ttft:4"], "two limits"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", "{"], "is not JSON"),
        (["--rate", "0"], "error: rate 0.0 is not above 0"),
        (["--rate", "1e-320"], "error: rate 1e-320 is too small"),
        (["--burstiness", "-1", "--rate", "2"], "error: burstiness -1.0 is not above 0"),
        (["--range-ratio", "1"], "range ratio 1 is out of range"),
        (["--time-scale", "0"], "--time-scale 0"),
        (["--dataset", "/nowhere.csv"], "cannot read --dataset /nowhere.csv"),
        (["--output", "/nowhere/x.json"], "cannot write --output /nowhere/x.json: there is no directory /nowhere"),
        (["--model", "other"], "no model 'other'"),
        (["--endpoint", "chat", "--strict-in-out-len"], "--endpoint completions"),
        (["--url", "ftp://x"], "not the address"),
    ],
)
def test_wrong_options_are_one_sentence(argv: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Stub()) as stub:
        assert fragment in refused(capsys, "serve", "--url", stub.url, "--num-prompts", "2", *argv)
        assert stub.bodies == []


def test_a_trace_has_its_own_arrivals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    with serving(Stub()) as stub:
        argv = ["serve", "--url", stub.url, "--dataset", str(file), "--rate", "3"]
        assert "--time-scale" in refused(capsys, *argv)


def test_latency_of_the_engine(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    artifact, file = str(tiny_artifact.artifact), tmp_path / "latency.json"
    data = bench(
        capsys, "latency", artifact, "--input-len", "12", "--output-len", "8", "--batch", "2", "--repeats", "3",
        "--threads", "1", "-o", str(file),
    )  # fmt: skip
    assert json.loads(file.read_text()) == data
    assert data["threads"] == 1
    assert data["run_ms"]["count"] == len(data["runs"]) == 3
    assert data["ttft_ms"]["count"] == data["tpot_ms"]["count"] == 6
    for run in data["runs"]:
        assert (run["completed"], run["input_tokens"], run["output_tokens"], run["cached_tokens"]) == (2, 24, 16, 0)
        assert run["peak_concurrency"] == 2
        assert run["e2e_ms"]["mean"] == pytest.approx(run["ttft_ms"]["mean"] + 7 * run["tpot_ms"]["mean"])
    assert cli.main(["bench", "latency", artifact, "--input-len", "8", "--output-len", "4", "--repeats", "1"]) == 0
    assert "1 requests of 8 + 4 tokens" in capsys.readouterr().out


def test_throughput_of_the_engine(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = str(tiny_artifact.artifact)
    data = bench(
        capsys, "throughput", artifact, "--num-prompts", "9", "--input-len", "10", "--output-len", "6",
        "--concurrency", "4", "--range-ratio", "0.5", "--warmup", "0", "--repeats", "2",
    )  # fmt: skip
    assert [run["completed"] for run in data["runs"]] == [9, 9]
    assert all(run["peak_concurrency"] <= 4 for run in data["runs"])
    assert data["output_tokens_per_s"]["min"] == min(run["output_tokens_per_s"] for run in data["runs"]) > 0
    message = refused(capsys, "throughput", artifact, "--input-len", "60", "--output-len", "10")
    assert "60 prompt and 10 output tokens exceed max-model-len 64" in message
