"""text_offset of /v1/completions: where in the text of the choice a token begins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from support.server_harness import Running, running_server

GREEDY = {"temperature": 0, "ignore_eos": True}
TORN = "bytes:"


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as server:
        yield server


def places(choice: dict[str, Any]) -> list[tuple[str, int]]:
    found = choice["logprobs"]
    return list(zip(found["tokens"], found["text_offset"], strict=True))


def choice_of(running: Running, prompt: Any, **body: Any) -> dict[str, Any]:
    (choice,) = running.complete(prompt, **{"logprobs": 0, **GREEDY, **body})["choices"]
    assert isinstance(choice, dict)
    return choice


def token_ids(running: Running, text: str) -> list[int]:
    answer = running.post("/tokenize", prompt=text, add_special_tokens=False).json()
    return [int(token) for token in answer["tokens"]]


def torn(text: str) -> list[tuple[str, int]]:
    """Characters as their bytes, each with the number of its character."""
    return [(f"{TORN}\\x{byte:02x}", number) for number, char in enumerate(text) for byte in char.encode()]


def test_bytes_have_the_offset_of_their_character(running: Running) -> None:
    choice = choice_of(running, "hé, 日", echo=True, max_tokens=3)
    found = places(choice)
    before = [("<s>", 0), ("h", 0), *[(token, 1) for token, _ in torn("é")], (",", 2), (" ", 3)]
    assert found[:-3] == [*before, *[(token, 4) for token, _ in torn("日")]]
    assert len(choice["text"]) > 5
    for token, offset in found[-3:]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("prompt", ["a<s>b</s> c", "the cat"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("as_ids", [True, False])
def test_special_tokens_count_where_the_text_has_them(running: Running, prompt: str, skip: bool, as_ids: bool) -> None:
    asked = [0, *token_ids(running, prompt)] if as_ids else prompt
    choice = choice_of(running, asked, echo=True, max_tokens=4, skip_special_tokens=skip)
    end = 0
    for token, offset in places(choice):
        assert offset == end
        # Only text that was given as text, and decoded text that keeps them, has their names.
        end += len(token) if choice["text"].startswith(token, offset) else 0
    assert end == len(choice["text"])


def test_without_an_echo_they_begin_at_zero(running: Running) -> None:
    choice = choice_of(running, "the cat", max_tokens=8)
    end = 0
    for token, offset in places(choice):
        assert (offset, choice["text"][offset : offset + len(token)]) == (end, token)
        end += len(token)


def test_torn_bytes_have_the_offset_of_what_stands_for_them(running: Running) -> None:
    """Any byte may follow any, and the last ones may be no character at all."""
    bias = {str(token): 100 for token in token_ids(running, "é世")}
    for seed in range(8):
        choice = choice_of(running, "h", max_tokens=12, temperature=2, seed=seed, logit_bias=bias)
        data = bytes(int(token.removeprefix(TORN + "\\x"), 16) for token, _ in places(choice))
        expected = [min(number, len(choice["text"])) for number in characters(data)]
        assert choice["logprobs"]["text_offset"] == expected, (seed, data)


def characters(data: bytes) -> list[int]:
    """The number of the character to which each byte belongs; one stands for bytes that are none."""
    numbers = list[int]()
    while len(numbers) < len(data):
        rest = data[len(numbers) :]
        try:
            size = len(rest.decode()[0].encode())
        except UnicodeDecodeError as error:
            size = len(rest[: error.start].decode()[0].encode()) if error.start else error.end
        numbers += [numbers[-1] + 1 if numbers else 0] * size
    return numbers


def test_no_token_lies_behind_a_stop_string(running: Running) -> None:
    whole = choice_of(running, "the cat", max_tokens=12)
    text, found = whole["text"], places(whole)
    start = found[4][1]
    choice = choice_of(running, "the cat", max_tokens=12, stop=[text[start + 1 : found[6][1] + 1]])
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: start + 1]
    assert places(choice) == [(token, min(offset, start + 1)) for token, offset in found[:7]]


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"stop": ["e"]}, {"n": 2, "echo": True}])
def test_offsets_of_chunks_go_on(running: Running, extra: dict[str, Any]) -> None:
    body = {"prompt": "hé 世", "max_tokens": 24, "temperature": 1.5, "seed": 3, "logprobs": 1, **extra}
    whole = running.post("/v1/completions", **body).json()["choices"]
    events = running.events("/v1/completions", **body)
    for choice in whole:
        parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert [*chain.from_iterable(places(one) for one in parts)] == places(choice)
