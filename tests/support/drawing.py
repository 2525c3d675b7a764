"""Requests that are drawn in every way, and all that an engine says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.runtime.binding import Artifact, Engine, Event, SamplingParams

from support.engine_driver import random_ids

EOS = 2
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 20},
    {"temperature": 1.0},
    {"temperature": 0.3, "num_logprobs": 0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.1, "top_k": 7, "num_logprobs": 3},
    {"temperature": 0.9, "top_k": 1024},
    {"temperature": 0.9, "top_k": 1025},
    {"temperature": 0.02, "top_p": 0.9},
    {"temperature": 0.05, "top_p": 0.5, "min_p": 0.001, "num_logprobs": 1},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 0.1, "min_p": 0.05},
    {"temperature": 0.2, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25},
    {"temperature": 0.7, "repetition_penalty": 0.7, "frequency_penalty": 0.3, "top_k": 40, "num_logprobs": 2},
    {"temperature": 0.5, "logit_bias": {5: 3.5, 8999: 2.0, 17: -100.0}, "min_tokens": 4, "stop_token_ids": [9, 5]},
    {"temperature": 1.0, "n": 3, "top_p": 0.95},
]


def mask(seed: int, vocab: int, *, few: bool) -> np.ndarray:
    """Tokens that are allowed: some, or two of which one ends the text."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, -(-vocab // 32), dtype=np.uint64).astype(np.uint32)
    if few:
        words[:] = 0
        words[EOS // 32] |= np.uint32(1 << EOS)
        words[8500 // 32] |= np.uint32(1 << (8500 % 32))
    return words


def answers(artifact: Artifact, **options: Any) -> tuple[list[tuple[Any, ...]], Mapping[str, int]]:
    """Every event of requests of all kinds at once, but for times, and what the device counted."""
    vocab = artifact.info.vocab_size
    with Engine(artifact, num_blocks=400, **options) as engine:
        ids = []
        for number, way in enumerate(WAYS):
            params = SamplingParams(seed=number, max_tokens=6, ignore_eos="stop_token_ids" not in way, **way)
            scored = 2 if number == 1 else None
            ids.append(engine.submit(random_ids(number, 5 + number), params, num_prompt_logprobs=scored))
        guided = []
        for number, way in enumerate(WAYS[:3] + WAYS[8:9] + WAYS[13:16]):
            params = SamplingParams(seed=number, max_tokens=5, **way)
            guided.append(engine.submit(random_ids(90 + number, 5), params, guided=True))
        found: list[tuple[Any, ...]] = []
        while engine.stats.num_running or engine.stats.num_waiting:
            engine.step()
            for event in engine.poll():
                if event.kind == "needs_mask":
                    words = mask(event.num_output_tokens, vocab, few=event.request_id in guided[-2:])
                    engine.set_token_mask(event.request_id, event.output_index, words)
                else:
                    found.append(told(event))
        return sorted(found, key=lambda one: one[:3]), engine.stats.device


def told(event: Event) -> tuple[Any, ...]:
    facts = (event.request_id, event.output_index, event.position, event.kind, event.token_id, event.finish_reason)
    return (*facts, event.logprob, event.rank, event.top_logprobs, event.error_message)
