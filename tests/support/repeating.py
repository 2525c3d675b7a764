"""Requests whose texts repeat themselves, so that guesses of their next tokens are right now and then."""

from __future__ import annotations

from typing import Any

from llmc.runtime.binding import Artifact, Engine, EngineStats, SamplingParams

from support.engine_driver import Request, bits, drive, random_ids


def repeating_requests() -> list[Request]:
    """Texts of few tokens, so that guesses are right now and then, drawn in every way; prompts share a prefix."""
    shared = random_ids(60, 33)
    requests = []
    for i in range(10):
        liked = {int(token): 9.0 + i for token in random_ids(80 + i, 1 + i % 3)}
        common: dict[str, Any] = {"max_tokens": 20 + i, "ignore_eos": i % 2 == 0, "num_logprobs": i % 4}
        common |= {"logit_bias": liked, "stop_token_ids": (random_ids(7, 1)[0],), "min_tokens": i % 5}
        if i % 3 == 0:
            params = SamplingParams(temperature=0.0, **common)
        elif i % 3 == 1:
            params = SamplingParams(temperature=0.9, seed=i, n=1 + i % 3, top_p=0.95, **common)
        else:
            params = SamplingParams(
                temperature=1.1, seed=i, top_k=40, repetition_penalty=1.1, frequency_penalty=0.2, **common
            )
        requests.append((shared[: 20 + i] + random_ids(90 + i, 4) * 3, params))
    return requests


def run_twice(
    artifact: Artifact, requests: list[Request], **options: Any
) -> tuple[list[list[tuple[Any, ...]]], EngineStats]:
    """Results of the second time, with what the prefix cache has kept; and the engine's statistics."""
    with Engine(artifact, **{"num_threads": 1, **options}) as engine:
        for _ in range(2):
            found = [[bits(o) for o in outputs] for outputs in drive(engine, requests)]
        return found, engine.stats
