"""How the server behaves under cancellation, limits, load and shutdown."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from llmc.runtime.params import SamplingParams
from llmc.runtime.server.answers import check_end, submit
from llmc.runtime.server.app import create_app
from llmc.runtime.server.pace import MAX_RETRY_S, MIN_RETRY_S, Pace
from llmc.runtime.server.requests import EngineRequest, QueueFull, RequestFailed, RequestRecord, ServerStopping
from llmc.runtime.server.run import open_engine

from support.server_harness import Running, error_of, make_config, parse_events, running_server, slow_down, until

PROMPT = "It is a truth universally acknowledged, that"
ENDLESS = {"max_tokens": 480, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, request_timeout_s=None) as running:
        yield running


def records_of(running: Running) -> list[RequestRecord]:
    """Records from now on."""
    records: list[RequestRecord] = []
    running.engine.on_record.append(records.append)
    return records


def wait_until_idle(running: Running) -> None:
    until(lambda: running.engine.num_active == 0)
    stats = running.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


# --- cancelling -------------------------------------------------------------------------------------------------


def test_a_stream_that_is_closed_ends_the_request(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(running.engine, monkeypatch)
    records = records_of(running)
    with running.client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True, **ENDLESS}) as answer:
        next(answer.iter_lines())
        assert running.engine.num_active == 1
    wait_until_idle(running)
    until(lambda: len(records) == 1)
    (record,) = records
    assert record.finish_reasons == ("cancelled",)
    assert record.num_output_tokens < ENDLESS["max_tokens"]


def test_a_client_that_leaves_ends_its_batch(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(running.engine, monkeypatch)
    records = records_of(running)
    body = json.dumps({"prompt": [PROMPT] * 8, **ENDLESS}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(running.url).port)) as connection:
        connection.sendall(head % len(body) + body)
        until(lambda: running.engine.num_active == 8)
    wait_until_idle(running)
    until(lambda: len(records) == 8)
    assert [record.finish_reasons for record in records] == [("cancelled",)] * 8


def test_closing_cancels_before_the_next_step(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed after the step in flight when the iterator is closed."""
    slow_down(running.engine, monkeypatch)
    records = records_of(running)

    async def work() -> tuple[int, int]:
        ids = tuple(running.server.tokenizer.encode(PROMPT))
        stream = running.engine.stream(EngineRequest("r", ids, SamplingParams(max_tokens=400, ignore_eos=True)))
        async for _ in stream:
            break
        stream.close()
        steps = running.engine.stats().num_steps
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        while running.engine.num_active:
            await asyncio.sleep(0.001)
        return steps, running.engine.stats().num_steps

    at_close, at_end = running.on_loop(work)
    assert at_end <= at_close + 1
    (record,) = records
    assert record.finish_reasons == ("cancelled",)
    assert 0 < record.num_output_tokens < 400


def test_what_a_stop_string_ends_is_cancelled_in_the_engine(running: Running) -> None:
    records = records_of(running)
    answer = running.complete(PROMPT, stop=[" "], **ENDLESS)
    wait_until_idle(running)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert records[0].finish_reasons == ("stop",)
    assert records[0].num_output_tokens < 100


# --- limits -----------------------------------------------------------------------------------------------------


def test_timeouts(running: Running) -> None:
    headers = {"X-Request-Timeout": "0.000001"}
    response = running.client.post("/v1/completions", json={"prompt": PROMPT, **ENDLESS}, headers=headers)
    assert error_of(response, 408)["code"] == "request_timeout"
    assert response.headers["x-should-retry"] == "false"
    body = {"prompt": PROMPT, "stream": True, **ENDLESS}
    streamed = running.client.post("/v1/completions", json=body, headers=headers)
    assert parse_events(streamed.text)[-1]["error"]["code"] == "request_timeout"
    for wrong in ("x", "0", "nan", "-1"):
        refused = running.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Timeout": wrong})
        error_of(refused, 400)
    wait_until_idle(running)


def test_the_servers_own_timeout_wins_over_a_longer_one(english_artifact: Path) -> None:
    with running_server(english_artifact, request_timeout_s=1e-6) as running:
        headers = {"X-Request-Timeout": "100"}
        response = running.client.post("/v1/completions", json={"prompt": PROMPT, **ENDLESS}, headers=headers)
        error_of(response, 408)


def test_a_full_queue_is_429_and_takes_nothing(english_artifact: Path) -> None:
    with running_server(english_artifact, max_num_seqs=1, max_queue=2) as running:
        records = records_of(running)
        response = running.post("/v1/completions", prompt=[PROMPT] * 8, **ENDLESS)
        error = error_of(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "--max-queue" in error["message"]
        assert "max_waiting" not in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_S
        wait_until_idle(running)
        assert {record.finish_reasons for record in records} <= {("cancelled",)}
        assert running.complete(PROMPT, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2

        async def fill() -> None:
            request = EngineRequest("r", (5, 6, 7), SamplingParams(max_tokens=4))
            with pytest.raises(QueueFull):
                submit(running.server, [request] * 8)
            assert running.engine.num_active <= 3

        running.on_loop(fill)
        wait_until_idle(running)


def test_when_to_come_back_follows_the_pace() -> None:
    pace = Pace()
    assert pace.seconds_to_halve(1000, 0.0) == MIN_RETRY_S
    for second in range(100):
        pace.note(float(second))
    assert pace.seconds_to_halve(20, 99.0) == 10
    assert pace.seconds_to_halve(20, 99.0 + 58) == MAX_RETRY_S, "nothing ended for a minute"
    assert pace.seconds_to_halve(1, 99.0) == MIN_RETRY_S
    assert pace.seconds_to_halve(10_000, 99.0) == MAX_RETRY_S
    # What was long ago says nothing.
    assert pace.seconds_to_halve(1000, 1e6) == MIN_RETRY_S


def test_bodies_above_the_limit_are_413(english_artifact: Path) -> None:
    with running_server(english_artifact, max_body_bytes=1000) as running:
        error = error_of(running.post("/v1/completions", prompt="x" * 1000), 413)
        assert "1000 bytes" in error["message"]

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"x" * 100
            yield b'"}'

        headers = {"Content-Type": "application/json"}
        error_of(running.client.post("/v1/completions", content=chunks(), headers=headers), 413)
        assert running.complete(PROMPT, max_tokens=1)["object"] == "text_completion"


# --- keys and origins -------------------------------------------------------------------------------------------


def test_api_keys(english_artifact: Path) -> None:
    with running_server(english_artifact, api_keys=("one", "zwei ü")) as running:
        for path in ("/health", "/ready", "/version"):
            assert running.client.get(path).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer on"},
            {"Authorization": "Basic one"},
        ):
            response = running.client.get("/v1/models", headers=headers)
            error = error_of(response, 401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        for key in ("one", "zwei ü"):
            headers_of_key = {b"Authorization": b"Bearer " + key.encode()}
            assert running.client.get("/v1/models", headers=headers_of_key).status_code == 200
        error_of(running.post("/v1/completions", prompt="x"), 401)


def test_cors(english_artifact: Path) -> None:
    with running_server(english_artifact, allowed_origins=("https://a.example",), api_keys=("k",)) as running:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        preflight = running.client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = running.client.options("/v1/completions", headers={**asked, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        # A browser shows an error to a page only with this header.
        refused = running.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_several_names_of_one_model(english_artifact: Path) -> None:
    with running_server(english_artifact, served_model_names=("a", "org/b")) as running:
        assert [model["id"] for model in running.client.get("/v1/models").json()["data"]] == ["a", "org/b"]
        assert running.client.get("/v1/models/org/b").json()["id"] == "org/b"
        assert running.complete("x", max_tokens=1, model="org/b")["model"] == "org/b"
        assert running.complete("x", max_tokens=1)["model"] == "a"


# --- defaults ---------------------------------------------------------------------------------------------------


def test_sampling_defaults_are_the_models_or_openais(english_artifact: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 8}
    config = json.loads((english_artifact / "generation_config.json").read_text())
    models = {name: config[name] for name in ("temperature", "top_p")}
    openais = {"temperature": 1.0, "top_p": 1.0}
    with running_server(english_artifact) as running:
        auto = running.complete(**body)["choices"]
        assert auto == running.complete(**body, **models)["choices"]
        plain = running.complete(**body, **openais)["choices"]
        assert auto != plain
    with running_server(english_artifact, generation_config="none") as running:
        assert running.complete(**body)["choices"] == plain


def test_top_p_0_keeps_the_most_likely_token(english_artifact: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 8}
    with running_server(english_artifact) as running:
        greedy = running.complete(**body, temperature=0)["choices"]
        assert running.complete(**body, temperature=1.5, top_p=0)["choices"] == greedy
        assert running.complete(**body, temperature=1.5)["choices"] != greedy


# --- start and end ----------------------------------------------------------------------------------------------


def test_nothing_is_served_before_every_graph_is_warm(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(english_artifact)
    engine = open_engine(config)
    warm, walk = engine.engine.warm_load, engine.engine.walk_graph
    go_on = threading.Event()
    waiting = threading.Event()
    replayed: list[int] = []

    def held(graph: int, *load: int) -> int:
        if replayed:
            waiting.set()
            assert go_on.wait(60)
        replayed.append(graph)
        return warm(graph, *load) if load else walk(graph)

    monkeypatch.setattr(engine.engine, "warm_load", held)
    monkeypatch.setattr(engine.engine, "walk_graph", held)

    async def main() -> None:
        app = create_app(config, engine)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            while not waiting.is_set():
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).status_code == 200
            starting = await client.get("/ready")
            assert (starting.status_code, starting.json()["status"]) == (503, "starting")
            assert starting.json()["graphs"]["warm"] == 1
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert error_of(refused, 503)["code"] == "starting"
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/v1/models")).status_code == 200
            go_on.set()
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.001)
            assert sorted(replayed) == list(range(len(engine.graphs)))

    asyncio.run(main())


def test_an_engine_that_fails_is_told_everywhere(english_artifact: Path) -> None:
    from llmc.runtime.binding.handle import LlmcError

    with running_server(english_artifact) as running:
        failures: list[str] = []
        running.server.on_failure.append(failures.append)

        def broken() -> bool:
            raise LlmcError(11, "the device is gone")

        running.engine.engine.step = broken  # type: ignore[method-assign]
        response = running.post("/v1/completions", prompt=PROMPT, max_tokens=4)
        assert "the device is gone" in error_of(response, 500)["message"]
        assert running.client.get("/health").status_code == 503
        assert running.client.get("/ready").json()["status"] == "failed"
        error_of(running.post("/v1/completions", prompt=PROMPT), 503)
        assert failures


def test_draining_lets_requests_finish(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**ENDLESS, "max_tokens": 40}
    with running_server(english_artifact, drain_timeout_s=None) as running, ThreadPoolExecutor(4) as pool:
        slow_down(running.engine, monkeypatch)
        answers = [pool.submit(running.complete, PROMPT, **body) for _ in range(4)]
        until(lambda: running.engine.num_active == 4)

        async def drain() -> int:
            task = running.server.begin_drain()
            with pytest.raises(ServerStopping):
                running.engine.stream(EngineRequest("r", (5,), SamplingParams()))
            return await task

        assert running.on_loop(drain) == 0
        for answer in answers:
            assert answer.result()["usage"]["completion_tokens"] == body["max_tokens"]
        assert error_of(running.post("/v1/completions", prompt="x"), 503)["code"] == "draining"
        assert running.client.get("/ready").json()["status"] == "draining"


def test_draining_cancels_what_takes_too_long(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(english_artifact, drain_timeout_s=0.0) as running, ThreadPoolExecutor(2) as pool:
        slow_down(running.engine, monkeypatch)
        whole = pool.submit(running.post, "/v1/completions", prompt=PROMPT, **ENDLESS)
        streamed = pool.submit(running.post, "/v1/completions", prompt=PROMPT, stream=True, **ENDLESS)
        until(lambda: running.engine.num_active == 2)

        async def drain() -> int:
            return await running.server.begin_drain()

        assert running.on_loop(drain) == 2
        assert error_of(whole.result(), 503)["code"] == "draining"
        assert parse_events(streamed.result().text)[-1]["error"]["code"] == "draining"


# --- guided requests --------------------------------------------------------------------------------------------


class Letters:
    """Allows the given tokens, one after another; then the text is complete."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._tokens = list(tokens)
        self._num_words = -(-vocab_size // 32)

    @property
    def finished(self) -> bool:
        return not self._tokens

    def mask(self) -> np.ndarray:
        words = np.zeros(self._num_words, np.uint32)
        token = self._tokens[0] if self._tokens else 1
        words[token // 32] = np.uint32(1) << np.uint32(token % 32)
        return words

    def accept(self, token_id: int) -> None:
        if self._tokens and token_id != self._tokens.pop(0):
            raise ValueError("that token is not allowed")

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Letters:
        made = copy.copy(self)
        made._tokens = list(self._tokens)
        return made


def collect(running: Running, request: EngineRequest) -> dict[int, tuple[str, str | None]]:
    async def work() -> dict[int, tuple[str, str | None]]:
        outputs: dict[int, tuple[str, str | None]] = {}
        async for delta in running.engine.stream(request):
            check_end(delta)
            text, _ = outputs.get(delta.output_index, ("", None))
            outputs[delta.output_index] = (text + delta.text, delta.finish_reason)
        return outputs

    return running.on_loop(work)


def test_guides_decide_every_token(running: Running) -> None:
    tokenizer = running.server.tokenizer
    tokens = tokenizer.encode("guided text", add_special_tokens=False)
    prompt = tuple(tokenizer.encode(PROMPT))
    params = SamplingParams(max_tokens=50, n=3, seed=1)
    request = EngineRequest("g", prompt, params, guide=lambda: Letters(tokens, running.engine.vocab_size))
    assert collect(running, request) == {i: ("guided text", "stop") for i in range(3)}
    wait_until_idle(running)


def test_a_guide_that_raises_fails_its_request_alone(running: Running) -> None:
    prompt = tuple(running.server.tokenizer.encode(PROMPT))

    def broken() -> Any:
        raise ValueError("no such grammar")

    request = EngineRequest("g", prompt, SamplingParams(max_tokens=5), guide=broken)
    with pytest.raises(RequestFailed, match="no such grammar"):
        collect(running, request)
    wait_until_idle(running)
    plain = dataclasses.replace(request, guide=None)
    assert collect(running, plain)


def test_a_decoder_that_raises_fails_its_request_alone(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(running)
    tokenizer = running.server.tokenizer
    decode = tokenizer.decode
    calls: list[bool] = []

    def broken(token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        calls.append(skip_special_tokens)
        if not skip_special_tokens and calls.count(False) > 20:
            raise ValueError("no such token")
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", broken)
    with ThreadPoolExecutor(2) as pool:
        fine = pool.submit(running.complete, PROMPT, max_tokens=40, ignore_eos=True)
        bad = pool.submit(running.post, "/v1/completions", prompt=PROMPT, skip_special_tokens=False, **ENDLESS)
        assert fine.result()["usage"]["completion_tokens"] == 40
        assert "no such token" in error_of(bad.result(), 500)["message"]
    wait_until_idle(running)
    assert sorted(record.error is None for record in records) == [False, True]


# --- records ----------------------------------------------------------------------------------------------------


def test_every_request_has_one_record(running: Running) -> None:
    records = records_of(running)
    running.complete([PROMPT, "She"], n=2, max_tokens=5, ignore_eos=True)
    wait_until_idle(running)
    assert len(records) == 2
    assert len({record.request_id for record in records}) == 2
    for record in records:
        assert 0 < record.arrival_ns <= record.first_scheduled_ns <= record.first_token_ns <= record.finished_ns
        assert record.num_output_tokens == 10
        assert record.finish_reasons == ("length", "length")
        assert record.error is None


def test_a_reader_that_sleeps_gets_merged_deltas(running: Running) -> None:
    async def work() -> tuple[list[int], str]:
        ids = tuple(running.server.tokenizer.encode(PROMPT))
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=2)
        stream = running.engine.stream(EngineRequest("r", ids, params))
        while not stream.done:
            await asyncio.sleep(0.001)
        deltas = [delta async for delta in stream]
        return [len(delta.token_ids) for delta in deltas], "".join(delta.text for delta in deltas)

    counts, text = running.on_loop(work)
    assert counts == [40]
    openais = {"temperature": 1.0, "top_p": 1.0}
    assert text == running.complete(PROMPT, max_tokens=40, ignore_eos=True, seed=2, **openais)["choices"][0]["text"]


def test_sse_is_json_in_one_line(running: Running) -> None:
    response = running.post("/v1/completions", prompt=PROMPT, max_tokens=6, stream=True)
    assert response.headers["cache-control"] == "no-cache"
    for line in response.text.split("\n\n")[:-2]:
        assert "\n" not in line
        json.loads(line.removeprefix("data: "))
