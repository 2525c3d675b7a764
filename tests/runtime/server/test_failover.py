"""A stream that goes on where another server left off has the bytes that the undisturbed one has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.failover import STREAMS, folded, groups, sent_of
from support.server_harness import Running, error_of, running_server, slow_down

FAILOVER = {"id": "chatcmpl-5", "created": 1700000000, "seed": 2**63 + 5}


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, tool_call_parser="hermes", reasoning_parser="qwen3") as one:
        yield one


def streamed(running: Running, path: str, body: dict[str, Any], **failover: Any) -> str:
    asked = {**body, "stream": True, "llmc_failover": {**FAILOVER, **failover}}
    response = running.client.post(path, json=asked)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("name", STREAMS)
def test_it_goes_on_from_every_comment(running: Running, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = STREAMS[name]
    with monkeypatch.context() as slowed:
        slow_down(running.engine, slowed, 0.02)  # a comment for each token, rather than for many
        whole = streamed(running, path, body)
    parts, wanted = groups(whole), folded(whole)
    num_choices = len(wanted["choices"])
    assert len(parts) > 1
    # Events with names open and close parts of an answer: each place where that happens differs.
    kinds = [set(re.findall("^event: (.*)$", events, re.M)) for events, _ in parts]
    between = {cut for cut in range(1, len(parts)) if kinds[cut - 1] != kinds[cut]}
    for cut in sorted({*range(1, len(parts), 1 + len(parts) // 5), len(parts) - 1, *between}):
        told = "".join(events for events, _ in parts[:cut])
        sent = sent_of((comment for _, comment in parts[:cut]), num_choices)
        rest = streamed(running, path, body, sent=sent, num_events=told.count("\n\n"))
        assert folded(told + rest) == wanted, cut


def test_nothing_is_told_of_tokens_unless_asked_for(running: Running) -> None:
    path, body = STREAMS["chat"]
    assert ": llmc" not in running.client.post(path, json={**body, "stream": True}).text
    assert ": llmc head" in streamed(running, path, body)


def test_ids_of_an_answer_that_does_not_stream(running: Running) -> None:
    path, body = STREAMS["tools"]
    first, second = (running.post(path, **body, llmc_failover=FAILOVER).json() for _ in range(2))
    for answer in (first, second):
        del answer["usage"]["prompt_tokens_details"]
    assert first == second
    assert (first["id"], first["created"]) == (FAILOVER["id"], FAILOVER["created"])


def test_prompts_of_a_batch_have_seeds_of_their_own(running: Running) -> None:
    path, body = STREAMS["batch"]
    texts = [choice["text"] for choice in running.post(path, **body, llmc_failover=FAILOVER).json()["choices"]]
    assert len(set(texts)) == len(texts)


def test_another_answer_is_not_gone_on_with(running: Running) -> None:
    path, body = STREAMS["greedy"]
    sent = [{"token_ids": [5, 6, 7]}]
    last = streamed(running, path, body, sent=sent).split("\n\n")[-3]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "diverged"
    assert "and 7 where it began" in error["message"]


@pytest.mark.parametrize(
    ("failover", "says"),
    [
        ({"sent": []}, "give one for each of 1 choices"),
        ({"sent": [{"token_ids": [1]}] * 2}, "has 2 entries"),
        ({"sent": [{"token_ids": [-1]}]}, "llmc_failover.sent.0.token_ids.0"),
        ({"sent": [{"token_ids": [10**6, 1]}]}, "prompt_token_ids"),
        ({"sent": [{"token_ids": [5] * 30}]}, "max_tokens is 24"),
        ({"id": "a b"}, "llmc_failover.id"),
        ({"seed": -1}, "llmc_failover.seed"),
    ],
)
def test_what_cannot_be_gone_on_with(running: Running, failover: dict[str, Any], says: str) -> None:
    path, body = STREAMS["greedy"]
    asked = {**body, "stream": True, "llmc_failover": {**FAILOVER, **failover}}
    assert says in error_of(running.client.post(path, json=asked), 400)["message"]


def test_only_streams_go_on(running: Running) -> None:
    path, body = STREAMS["greedy"]
    answer = running.post(path, **body, llmc_failover={**FAILOVER, "sent": [{}]})
    assert "stream to true" in error_of(answer, 400)["message"]
