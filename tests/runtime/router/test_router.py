"""Replicas behind one endpoint: none of what happens to them is seen by a client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.failover import STREAMS
from support.live_router import Asked, LiveRouter, ask_all, routing


@pytest.fixture(scope="module")
def router(english_artifact: Path) -> Iterator[LiveRouter]:
    with routing("--spawn", "2", english_artifact) as one:
        one.until_all_ready(2)
        yield one


def requests(*, seed: int, num_tokens: int) -> list[Asked]:
    """64: of each kind that has a seed, streaming and not."""
    kinds = [(path, body) for path, body in STREAMS.values() if body.get("seed", body.get("temperature")) is not None]
    found: list[Asked] = []
    for number in range(64):
        path, body = kinds[number // 2 % len(kinds)]
        asked: dict[str, Any] = {**body, "seed": seed + number // 2}
        # Short ones are guided, or have logprobs of their prompt.
        if not {"guided_regex", "response_format", "tools", "prompt_logprobs"} & body.keys():
            asked |= {"max_tokens": num_tokens, "ignore_eos": True}
        if number % 2:
            asked["stream"] = True
        else:
            asked.pop("stream_options", None)
        found.append((path, asked))
    return found


def test_replicas_are_killed_and_no_client_sees_it(router: LiveRouter) -> None:
    asked = requests(seed=100, num_tokens=150)
    undisturbed = ask_all(router, asked)
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.extend(ask_all(router, asked)))
    client.start()
    killed = []
    while client.is_alive() and len(killed) < 4:
        name = router.kill_busiest()
        killed += [name] if name is not None else []
        client.join(0.5)
    client.join()
    assert killed
    assert router.metric("llmc_router_failovers_total") > 0
    assert router.metric("llmc_router_broken_streams_total") == 0
    assert len(answers) == len(undisturbed)
    for (_, body), found, wanted in zip(asked, answers, undisturbed, strict=True):
        assert found == wanted, body
    router.until_all_ready(2)
