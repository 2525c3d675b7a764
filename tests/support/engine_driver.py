"""Shared by the engine's tests: run requests step by step, and the greedy loop of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from llmc.runtime.binding import Engine, SamplingParams
from llmc.runtime.binding.placed_rows import PlacedRows

MIXED_LADDER = "prefill=[1,8]x[8],decode=[1,8]x[64,128]"


@dataclass
class Output:
    """One continuation as its events told it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reason: str | None = None
    last_id: int = -1
    num_cached: int = 0


Request = tuple[list[int], SamplingParams]


def drive(
    engine: Engine,
    requests: list[Request],
    on_step: Callable[[int], None] = lambda step: None,
    placed: Mapping[int, Sequence[PlacedRows]] | None = None,
) -> list[list[Output]]:
    """Runs requests to their ends, checking the engine's integrity after every step; outputs by request and index.

    placed: rows in place of tokens, by the number of the request.
    """
    rows = placed or {}
    ids = [engine.submit(prompt, params, placed=rows.get(i, ())) for i, (prompt, params) in enumerate(requests)]
    outputs = {i: [Output() for _ in range(params.n)] for i, (_, params) in zip(ids, requests, strict=True)}
    step = 0
    while True:
        progressed = engine.step()
        engine.check_integrity()
        events = engine.poll()
        for event in events:
            output = outputs[event.request_id][event.output_index]
            assert output.reason is None, "an event after the end"
            output.num_cached = event.num_cached_tokens
            if event.kind == "token":
                output.ids.append(event.token_id)
                output.logprobs.append(event.logprob)
                output.top.append(event.top_logprobs)
                assert event.num_output_tokens == len(output.ids)
            else:
                assert event.kind == "finished"
                output.reason, output.last_id = event.finish_reason, event.token_id
        if not progressed and not events:
            break
        on_step(step)
        step += 1
    assert all(o.reason for of in outputs.values() for o in of)
    return [outputs[i] for i in ids]


def random_ids(seed: int, count: int, vocab: int = 515) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, count)]


def greedy(max_tokens: int = 64, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **({"ignore_eos": True} | more))


def reference_logits(model: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """float32 [T, V] of transformers."""
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = found(torch.tensor([tokens])).logits[0].numpy()
    return logits


def assert_greedy(model: Path, prompt: list[int], ids: list[int]) -> None:
    """Each id is the argmax of transformers after the ones before it: what its greedy loop would have produced."""
    expected = reference_logits(model, prompt + ids)[len(prompt) - 1 : -1].argmax(-1)
    assert ids == expected.tolist()


def bits(output: Output) -> tuple[Any, ...]:
    # Logprobs are float32 values in Python floats: equal means the same bits.
    return output.ids, output.logprobs, output.top, output.reason


def mixed_requests() -> list[Request]:
    """Greedy and seeded sampling, n > 1, penalties; half of the prompts share a prefix of three blocks."""
    shared = random_ids(20, 50)
    requests = []
    for i in range(9):
        prompt = shared[: 48 + i % 3] + random_ids(30 + i, 3 + 4 * i) if i % 2 else random_ids(40 + i, 1 + 7 * i)
        common: dict[str, Any] = {"max_tokens": 12 + 3 * (i % 4), "ignore_eos": True, "num_logprobs": i % 4}
        if i % 3 == 0:
            params = SamplingParams(temperature=0.0, **common)
        elif i % 3 == 1:
            params = SamplingParams(temperature=0.9, seed=i, n=1 + i % 4, top_p=0.95, **common)
        else:
            params = SamplingParams(temperature=1.2, seed=i, top_k=40, repetition_penalty=1.2, **common)
        requests.append((prompt, params))
    return requests
