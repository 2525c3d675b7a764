"""A prefill and a decode server: the same answers as of one server, whatever becomes of the blocks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.binding.hand_over import HEADER_BYTES, HandedText
from llmc.runtime.binding.handle import ERROR_NAMES, LlmcError
from llmc.runtime.server.block_frames import END, FrameError, FrameReader, length_of
from llmc.runtime.server.hand_over import PATH
from llmc.runtime.server.hand_over_headers import KEY_HEADER, URL_HEADER
from llmc.runtime.server.requests import ServerStopping
from llmc.runtime.server.shared_blocks import ADDRESS_HEADER, SLOTS, GivenMemory, TakenMemory

from support.server_harness import Running, error_of, running_server

KEY = "a key of both servers"
PROMPT = " ".join(f"It is a truth number {number}." for number in range(24))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 1.1, "logprobs": 1}


def framed(data: bytes) -> bytes:
    return length_of(data) + data


@pytest.fixture(scope="module")
def prefill(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, role="prefill", hand_over_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def decode(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, role="decode", hand_over_key=KEY, hand_over_timeout_s=60.0) as server:
        yield server


def ask(
    server: Running, url: str, body: dict[str, Any], key: str = KEY, path: str = "/v1/completions"
) -> dict[str, Any]:
    response = server.client.post(path, json=body, headers={URL_HEADER: url, KEY_HEADER: key})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def forget(server: Running, number: int) -> dict[str, Any]:
    """A request whose prompt no cache knows."""
    return {**BODY, "prompt": f"{number} {PROMPT}"}


@contextmanager
def over_tcp(decode: Running, prefill: Running) -> Iterator[None]:
    """As if they were not on one host."""
    decode.server.hand_over._apart[prefill.url] = math.inf
    yield
    del decode.server.hand_over._apart[prefill.url]


def test_a_decode_server_computes_the_rest_of_the_last_block(prefill: Running, decode: Running) -> None:
    assert {**decode.client.get("/v1/models").json()["data"][0]}["role"] == "decode"
    tokens = decode.complete(PROMPT, max_tokens=1)["usage"]["prompt_tokens"]
    body = forget(decode, 1)
    wanted = prefill.complete(**body)
    found = ask(decode, prefill.url, body)
    assert found["choices"] == wanted["choices"]
    size = decode.engine.block_size
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (found["usage"]["prompt_tokens"] - 1) // size * size > tokens // 2
    chat = {"messages": [{"role": "user", "content": f"2 {PROMPT}"}], "max_tokens": 8, "temperature": 0}
    assert decode.server.hand_over.counts.shared == 1
    with over_tcp(decode, prefill):
        found = ask(decode, prefill.url, chat, path="/v1/chat/completions")
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["choices"] == prefill.post("/v1/chat/completions", **chat).json()["choices"]
    counts, sent = decode.server.hand_over.counts, prefill.server.hand_over.counts
    assert (counts.received, sent.sent, counts.shared) == (2, 2, 1)
    assert counts.received_blocks == sent.sent_blocks
    assert counts.received_bytes == sent.sent_bytes > 0
    assert not counts.fallbacks
    page = decode.client.get("/metrics").text
    assert f'llmc_handover_blocks_total{{direction="received"}} {float(counts.received_blocks)}' in page


def test_other_apis_take_blocks_as_well(prefill: Running, decode: Running) -> None:
    before = decode.server.hand_over.counts.received
    message = {"messages": [{"role": "user", "content": f"3 {PROMPT}"}], "max_tokens": 8, "temperature": 0}
    response = {"input": f"4 {PROMPT}", "max_output_tokens": 8, "temperature": 0}
    found = ask(decode, prefill.url, message, path="/v1/messages")
    assert found["usage"]["cache_read_input_tokens"] > 0
    assert found["content"] == prefill.post("/v1/messages", **message).json()["content"]
    found = ask(decode, prefill.url, response, path="/v1/responses")
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > 0
    told = prefill.post("/v1/responses", **response).json()
    assert found["output"][0]["content"] == told["output"][0]["content"]
    assert decode.server.hand_over.counts.received == before + 2


@pytest.fixture(scope="module")
def chunked(english_artifact: Path) -> Iterator[Running]:
    """A prefill server that computes 32 tokens a step."""
    options: dict[str, Any] = {"role": "prefill", "hand_over_key": KEY, "max_num_batched_tokens": 32}
    with running_server(english_artifact, **options) as server:
        yield server


@contextmanager
def held_until_a_part_left(server: Running, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """After its first step the engine computes nothing more until blocks have left; `then` is called once they have."""
    engine, counts = server.engine.engine, server.server.hand_over.counts
    before, step, state = counts.sent_blocks, engine.step, "waits"

    def held() -> bool:
        nonlocal state
        if state == "begun" and counts.sent_blocks == before:
            time.sleep(0.001)
            return True
        if state == "begun":
            state = "goes on"
            then()
        progressed = step()
        state = "begun" if state == "waits" and progressed else state
        return progressed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", held)
        yield


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_leave_while_the_rest_is_computed(chunked: Running, decode: Running, shared: bool) -> None:
    counts, sent = decode.server.hand_over.counts, chunked.server.hand_over.counts
    before, given = dataclasses.replace(counts), dataclasses.replace(sent)
    body = forget(decode, 77 + shared)
    with held_until_a_part_left(chunked), contextlib.nullcontext() if shared else over_tcp(decode, chunked):
        found = ask(decode, chunked.url, body)
    assert found["choices"] == chunked.complete(**body)["choices"]
    num_blocks = sent.sent_blocks - given.sent_blocks
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == num_blocks * decode.engine.block_size
    assert (counts.received, counts.shared) == (before.received + 1, before.shared + shared)
    header_bytes = sent.sent_bytes - given.sent_bytes - num_blocks * chunked.engine.engine.handed_block_bytes
    assert header_bytes >= 2 * HEADER_BYTES
    assert chunked.server.hand_over._num_memories == 0


def test_a_part_waits_until_the_memory_has_room(prefill: Running, decode: Running) -> None:
    """Parts of one block, of which the memory holds a few."""
    body, counts = {**BODY, "prompt": "79" + PROMPT + PROMPT[:200]}, decode.server.hand_over.counts
    with pytest.MonkeyPatch.context() as patch:
        for one in (prefill, decode):
            patch.setattr(one.server.hand_over, "piece_bytes", HEADER_BYTES + one.engine.engine.handed_block_bytes)
        before = dataclasses.replace(counts)
        found = ask(decode, prefill.url, body)
    assert found["choices"] == prefill.complete(**body)["choices"]
    assert counts.received_blocks - before.received_blocks > 2 * SLOTS
    assert (counts.received, counts.shared) == (before.received + 1, before.shared + 1)


def test_a_text_that_fails_while_it_is_computed_is_cut_off(chunked: Running) -> None:
    body = {"identity": chunked.server.hand_over.identity, "token_ids": list(range(3, 403))}
    headers, engine = {"authorization": f"Bearer {KEY}"}, chunked.engine

    failed = threading.Event()

    def fail_all() -> None:
        for engine_id in list(engine._streams):
            engine._fail_request(engine_id, ValueError("nothing more"))
        failed.set()

    def fail_first() -> None:
        # Else the engine may end the text before the loop comes to it.
        engine.thread.call(fail_all)
        assert failed.wait(60)

    with held_until_a_part_left(chunked, fail_first):
        response = chunked.client.post(PATH, json=body, headers=headers)
    reader = FrameReader(chunked.server.hand_over.piece_bytes)
    assert response.status_code == 200
    assert reader.feed(response.content)
    assert not reader.ended


def test_calls_beside_steps_end_before_the_engine(english_artifact: Path) -> None:
    began, ended = threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        time.sleep(0.2)
        assert engine.engine.pointer
        ended.set()

    with running_server(english_artifact) as server:
        engine = server.engine
        asyncio.run_coroutine_threadsafe(engine.beside_steps(call), server.loop)
        assert began.wait(60)
    assert ended.is_set()
    with pytest.raises(ServerStopping):
        asyncio.run(engine.aside(call))


Act = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def scripted(act: Act) -> Iterator[str]:
    """A prefill server that does as it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers["content-length"]))
            act(self)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def gives(data: bytes, status: int = 200) -> Act:
    def act(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return act


@pytest.mark.parametrize(
    ("reason", "act"),
    [
        ("refused", gives(b"{}", 503)),
        ("refused", gives(b"", 404)),
        ("refused", gives(b"x" * (8 << 20), 500)),
        ("damaged", gives(b"\xff" * 64)),
        ("damaged", gives(framed(b"x" * (1 << 16)) + END)),
        ("damaged", gives(framed(bytes(64)) * 1000)),
        ("damaged", gives(END + b"more")),
        ("lost", gives(b"")),
        ("lost", gives((500).to_bytes(4, "little") + b"cut")),
        ("partial", gives(END)),
    ],
)
def test_what_a_bad_prefill_server_gives_is_not_believed(reason: str, act: Act, decode: Running) -> None:
    counts, before = decode.server.hand_over.counts, decode.server.hand_over.counts.fallbacks[reason]
    body = forget(decode, random.randrange(1 << 30))
    with scripted(act) as url:
        found = ask(decode, url, body)
    assert counts.fallbacks[reason] == before + 1
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert decode.complete(**body)["choices"] == found["choices"]


def test_an_engine_that_fails_is_not_called_damaged_blocks(prefill: Running, decode: Running) -> None:
    fallbacks, body = decode.server.hand_over.counts.fallbacks, forget(decode, 5)

    def fails(*_: Any) -> int:
        raise LlmcError(ERROR_NAMES.index("internal"), "The device is lost.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HandedText, "enter", fails)
        before = fallbacks.copy()
        found = ask(decode, prefill.url, body)
    assert fallbacks - before == {"engine": 1}
    assert found["choices"] == decode.complete(**body)["choices"]


def test_memory_that_cannot_be_opened_is_asked_for_once(decode: Running) -> None:
    asked: list[bool] = []

    def gives_address(address: str) -> Act:
        def act(handler: http.server.BaseHTTPRequestHandler) -> None:
            asked.append(json.loads(handler.body)["memory"])  # type: ignore[attr-defined]
            handler.send_response(200)
            if asked[-1] and address:
                handler.send_header(ADDRESS_HEADER, address)
            handler.send_header("content-length", str(len(END)))
            handler.end_headers()
            handler.wfile.write(END)

        return act

    nonce = "00" * 32
    for address in ("", "1 2 3", "x 2 3 4", "1 2 3 4", f"1 1 64 {nonce}", f"{os.getpid()} 0 64 {nonce}"):
        asked.clear()
        with scripted(gives_address(address)) as url:
            for _ in range(2):
                ask(decode, url, forget(decode, random.randrange(1 << 30)))
        assert asked == ([True, False, False] if address else [True, True])


def test_frames_that_tell_of_no_part_are_refused() -> None:
    given = GivenMemory(4096)
    try:
        taken = TakenMemory(given.address, 4096)
        for number in range(3 * SLOTS):
            assert given.num_free == SLOTS
            given.slot()[:5] = b"%05d" % number
            frame = given.give(5)
            for bad in (b"", frame[:-1], frame + b"x", bytes(8) if number else b"\1" * 8, frame[:4] + b"\xff" * 4):
                with pytest.raises(FrameError):
                    taken.part(bad)
            assert bytes(taken.part(frame)) == b"%05d" % number
            assert given.num_free == SLOTS - 1
            taken.release()
        with pytest.raises(ValueError, match="more than"):
            TakenMemory(given.address, 4095)
        with pytest.raises(ValueError, match="somebody else"):
            TakenMemory(given.address[:-1] + ("0" if given.address[-1] != "0" else "1"), 4096)
        with pytest.raises(ValueError, match="other memory"):
            TakenMemory(given.address.replace(" 4096 ", " 4000 "), 4096)
    finally:
        given.close()
    with pytest.raises((OSError, ValueError)):
        TakenMemory(given.address, 4096)


_TAKES = """
import sys
from llmc.runtime.server.shared_blocks import TakenMemory
try:
    memory = TakenMemory(sys.argv[1], 4096)
except (OSError, ValueError):
    print("over TCP")
else:
    print("shared", bytes(memory.part(bytes.fromhex(sys.argv[2]))).decode())
"""


@pytest.mark.parametrize(
    ("namespaces", "said"),
    [(("--mount", "--uts", "--ipc"), "shared blocks"), (("--pid", "--fork", "--mount-proc"), "over TCP")],
)
def test_containers_share_memory_if_they_see_each_others_processes(namespaces: tuple[str, ...], said: str) -> None:
    given = GivenMemory(4096)
    try:
        given.slot()[:6] = b"blocks"
        command = [
            shutil.which("unshare") or pytest.skip("unshare is not here"),
            *namespaces,
            sys.executable,
            "-P",
            "-c",
            _TAKES,
            given.address,
            given.give(6).hex(),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        given.close()
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces can be made here: {done.stderr}")
    assert (done.stdout, done.stderr) == (f"{said}\n", "")


def test_nothing_depends_on_the_prefill_server(prefill: Running, decode: Running) -> None:
    """It is gone, it hangs, the key is another, the blocks are others'; a request with a time limit."""
    fallbacks, hand_over = decode.server.hand_over.counts.fallbacks, decode.server.hand_over
    with scripted(gives(b"")) as gone:
        pass
    wanted = decode.complete(**BODY)["choices"]

    def falls_back(reason: str, url: str, key: str = KEY) -> None:
        before = fallbacks[reason]
        body = forget(decode, random.randrange(1 << 30))
        assert ask(decode, url, body, key)["choices"] == decode.complete(**body)["choices"]
        assert fallbacks[reason] == before + 1, reason

    falls_back("lost", gone)
    falls_back("lost", "no address")
    falls_back("key", prefill.url, "another key, of nobody")
    hang = threading.Event()
    with scripted(lambda handler: (hang.wait(60), None)[1]) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over, "timeout_s", 0.2)
        falls_back("timeout", url)
        hang.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over, "identity", "0" * 64)
        falls_back("refused", prefill.url)
    assert ask(decode, prefill.url, BODY)["choices"] == wanted
    response = decode.client.post("/v1/completions", json=BODY, headers={"x-request-timeout": "30"})
    assert response.json()["choices"] == wanted


def test_the_endpoint_is_for_holders_of_the_key(prefill: Running, decode: Running) -> None:
    keyed = {"authorization": f"Bearer {KEY}"}
    identity = prefill.server.hand_over.identity
    ids = list(range(3, 67))

    def post(headers: dict[str, str], **body: Any) -> httpx.Response:
        return prefill.client.post(PATH, json=body, headers=headers)

    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": KEY}, {"x-api-key": KEY}):
        assert error_of(post(headers, identity=identity, token_ids=ids), 401)["code"] == "invalid_hand_over_key"
    assert error_of(post(keyed, identity="0" * 64, token_ids=ids), 409)["code"] == "other_blocks"
    error_of(post(keyed, identity="0", token_ids=ids), 400)
    error_of(post(keyed, identity=identity, token_ids=[]), 400)
    error_of(post(keyed, identity=identity, token_ids=[-1]), 400)
    error_of(post(keyed, identity=identity, token_ids=[10**6] * 64), 400)
    error_of(post(keyed, identity=identity, token_ids=ids * 100), 400)
    error_of(post(keyed, identity=identity, token_ids=ids, first_block=-1), 400)
    assert post(keyed, identity=identity, token_ids=ids, first_block=1000).content == END
    assert post(keyed, identity=identity, token_ids=ids[:5]).content == END
    assert decode.client.post(PATH, json={}, headers=keyed).status_code == 404
    assert PATH not in prefill.client.get("/openapi.json").json()["paths"]


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    rng = random.Random(2)
    for _ in range(200):
        frames = [rng.randbytes(rng.randrange(1, 40)) for _ in range(rng.randrange(5))]
        body = b"".join(map(framed, frames)) + END
        reader, found, at = FrameReader(64), [], 0
        while at < len(body):
            step = rng.randrange(1, 30)
            found += reader.feed(body[at : at + step])
            at += step
        assert found == frames
        assert reader.ended
        assert not reader.within_frame
        with pytest.raises(FrameError):
            reader.feed(b"x")


def test_no_bytes_make_a_reader_hold_more_than_a_frame() -> None:
    rng = random.Random(3)
    for _ in range(500):
        reader = FrameReader(50)
        with contextlib.suppress(FrameError):
            for _ in range(20):
                piece = bytes(rng.choice((0, 1, 7, 255, rng.randrange(256))) for _ in range(rng.randrange(12)))
                reader.feed(piece)
        assert len(reader._frame or b"") <= 50
        assert len(reader._length) < 4
