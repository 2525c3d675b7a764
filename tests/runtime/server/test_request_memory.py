"""What requests may come to hold is bounded: each reserves its worst case, and gives it back however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.generation import Generation
from llmc.runtime.params import SamplingParams
from llmc.runtime.server.request_memory import MemoryLimits, MemoryRefused, RequestMemory
from llmc.runtime.server.request_size import BODY_FACTOR, RequestSize

from support.server_harness import PATIENCE_S, Running, error_of, running_server, slow_down, until

MIB = 1 << 20
PROMPT = "It is a truth universally acknowledged, that"
SIZE = RequestSize(
    prompt_tokens=(100,) * 16,
    n=8,
    max_tokens=200,
    logprobs=5,
    prompt_logprobs=2,
    guided=True,
    streams=False,
    max_model_len=512,
    vocab_size=1000,
)


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, max_queue_memory=32 * MIB, request_memory=8 * MIB) as running:
        yield running


# ---- the figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_tokens": (101,) * 16},
        {"prompt_tokens": (100,) * 17},
        {"n": 9},
        {"max_tokens": 201},
        {"logprobs": 6},
        {"prompt_logprobs": 3},
        {"vocab_size": 2000},
    ],
)
def test_what_multiplies_a_request_counts(more: dict[str, Any]) -> None:
    assert dataclasses.replace(SIZE, **more).bytes > SIZE.bytes


@pytest.mark.parametrize("less", [{"logprobs": None}, {"prompt_logprobs": None}, {"guided": False}, {"streams": True}])
def test_what_is_not_asked_for_does_not_count(less: dict[str, Any]) -> None:
    assert dataclasses.replace(SIZE, **less).bytes < SIZE.bytes


def test_max_tokens_counts_as_far_as_the_context_goes() -> None:
    assert dataclasses.replace(SIZE, max_tokens=1 << 30).bytes == dataclasses.replace(SIZE, max_tokens=412).bytes


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"prompt_tokens": (4,) * 1024, "n": 2, "max_tokens": 1}, ("prompt", "1024 prompts × n 2 × 1 tokens")),
        ({"prompt_tokens": (4,), "n": 64, "max_tokens": 10}, ("n", "n 64 × 10 tokens")),
        ({"prompt_tokens": (4,), "n": 2, "max_tokens": 400}, ("max_tokens", "n 2 × 400 tokens")),
        ({"prompt_tokens": (4,), "n": 2, "logprobs": 20}, ("max_tokens", "n 2 × 200 tokens × logprobs 20")),
        ({"prompt_tokens": (4,) * 2, "n": 2, "max_tokens": 2, "logprobs": 20}, ("logprobs", "…")),
        ({"prompt_tokens": (500,), "n": 1, "prompt_logprobs": 20}, ("prompt_logprobs", "× prompt_logprobs 20")),
    ],
)
def test_the_advice_names_the_field_that_costs_most(fields: dict[str, Any], advice: tuple[str, str]) -> None:
    plain = dataclasses.replace(SIZE, logprobs=None, prompt_logprobs=None, guided=False)
    field, figures = dataclasses.replace(plain, **fields).advice()
    assert field == advice[0]
    assert figures.endswith(advice[1]) or advice[1] == "…"


def test_limits_come_from_the_machine_unless_given() -> None:
    gib = 1 << 30
    assert MemoryLimits.of(0, 0, 16 * gib) == MemoryLimits(4 * gib, gib)
    assert MemoryLimits.of(0, 0, 0) == MemoryLimits(256 * MIB, 128 * MIB)
    assert MemoryLimits.of(0, 0, 1 << 50) == MemoryLimits(16 * gib, 4 * gib)
    assert MemoryLimits.of(100, 0, gib) == MemoryLimits(100, 100)
    assert MemoryLimits.of(0, 7, gib) == MemoryLimits(256 * MIB, 7)
    assert MemoryLimits.of(5, 7, gib) == MemoryLimits(5, 5), "one request cannot have more than all"


@pytest.mark.parametrize("seed", range(20))
def test_leases_add_up(seed: int) -> None:
    rng = random.Random(seed)
    memory = RequestMemory(MemoryLimits(1000, 300))
    leases = [memory.lease() for _ in range(10)]
    for _ in range(500):
        lease, count, before = rng.choice(leases), rng.randrange(400), memory.reserved
        if rng.random() < 0.3:
            lease.release()
            assert lease.bytes == 0
        else:
            fits = lease.bytes + count <= 300
            if fits and before + count <= 1000:
                lease.reserve(count)
            else:
                with pytest.raises(MemoryRefused) as refused:
                    lease.reserve(count)
                assert refused.value.status_code == (429 if fits else 413)
                assert memory.reserved == before, "what is refused reserves nothing"
        assert memory.reserved == sum(one.bytes for one in leases) <= memory.peak <= 1000
    for lease in leases * 2:
        lease.release()
    assert memory.reserved == 0


def test_a_continuation_that_waits_has_no_text_yet() -> None:
    """A request may have 65,536 of them."""
    decoded: list[int] = []

    def decode(token_ids: Any) -> str:
        decoded.append(len(token_ids))
        return "x" * len(token_ids)

    generation = Generation([1, 2, 3], SamplingParams(n=64), decode)
    assert decoded == []
    assert not hasattr(generation._outputs[0], "__dict__")
    generation.finish_output(5)
    assert decoded == []


# ---- a server ----------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_a_413(running: Running) -> None:
    body = {"prompt": [PROMPT] * 64, "n": 64, "max_tokens": 100}
    error = error_of(running.post("/v1/completions", **body), 413)
    assert (error["code"], error["type"]) == ("request_too_large", "invalid_request_error")
    figures = r"[\d.]+ MiB \(64 prompts × n 64 × 100 tokens\), the most allowed is 8\.0 MiB"
    advice = f"lower {error['param']}, or raise --request-memory"
    assert re.fullmatch(f"the request may need {figures}: {advice}", error["message"])
    assert running.server.memory.reserved == 0


def test_a_body_counts_as_it_comes(running: Running) -> None:
    error = error_of(running.post("/v1/completions", prompt="Hi", unknown="x" * (9 * MIB // BODY_FACTOR)), 413)
    assert "its body" in error["message"]
    assert "--request-memory" in error["message"]
    assert running.server.memory.reserved == 0


def test_beside_others_it_is_a_429(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(running.engine, monkeypatch)
    body = {"prompt": [PROMPT] * 16, "n": 16, "max_tokens": 100, "ignore_eos": True}
    memory = running.server.memory
    streamed = {**body, "stream": True}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=PATIENCE_S))
        lines = stack.enter_context(client.stream("POST", "/v1/completions", json=streamed)).iter_lines()
        next(lines)  # kept: without it the client leaves
        each = memory.reserved
        assert MIB < each < 8 * MIB
        for _ in range(32 * MIB // each - 1):
            assert stack.enter_context(client.stream("POST", "/v1/completions", json=streamed)).status_code == 200
        refused = client.post("/v1/completions", json=streamed)
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("memory_full", "rate_limit_error")
        assert "of --max-queue-memory (32.0 MiB) are free: try again in " in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        shown = dict(re.findall(r"^llmc_request_memory_(\w+) (\S+)$", client.get("/metrics").text, re.MULTILINE))
        assert {name: float(value) for name, value in shown.items()} == {
            "bytes": 32 * MIB,
            "request_bytes": 8 * MIB,
            "reserved_bytes": memory.reserved,
            "peak_bytes": memory.peak,
        }
        assert memory.reserved <= memory.peak <= 32 * MIB
    until(lambda: memory.reserved == 0)
    assert running.complete(PROMPT, max_tokens=1)["choices"]


def test_however_requests_end_nothing_stays_reserved(running: Running) -> None:
    """Answered, refused, failed, left by the client before, while or after it sent its body, and mid-stream."""
    rng = random.Random(1)
    port = httpx.URL(running.url).port
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "

    def one(number: int) -> None:
        way = number % 8
        body: dict[str, Any] = {"prompt": [PROMPT] * 4, "n": 4, "max_tokens": 20, "ignore_eos": True}
        with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:
            if way == 0:
                assert client.post("/v1/completions", json=body).status_code in (200, 429)
            elif way == 1:
                assert client.post("/v1/completions", json={**body, "n": 65}).status_code == 400
            elif way == 2:
                assert client.post("/v1/completions", json={**body, "max_tokens": 480, "n": 64}).status_code == 413
            elif way == 3:
                with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                    next(response.iter_lines())
            elif way == 4:
                answer = client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.001"})
                assert answer.status_code in (408, 429)
            elif way == 5:
                assert client.post("/v1/completions", content=b"{" * 5000).status_code in (400, 415)
            else:
                data = json.dumps(body).encode()
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    sent = data if way == 6 else data[: rng.randrange(len(data))]
                    connection.sendall(f"{head}{len(data)}\r\n\r\n".encode() + sent)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    memory = running.server.memory
    until(lambda: memory.reserved == 0 and running.engine.num_active == 0)
    assert memory.peak > 0
    assert running.complete(PROMPT, max_tokens=1)["choices"]
