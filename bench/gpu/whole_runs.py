"""What steps do not show of an artifact: how fast its weights reach the GPU, and a batch through `LLM.generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

_ROUNDS = 2
"""The first one reads weights from the disk, and runs each graph for the first time."""
_PROMPT = 128
"""Tokens of a prompt, if contexts are long enough."""


def upload(path: Path, copied_bytes_s: float) -> dict[str, float]:
    """Bytes of weights a second on their way from the file through pinned memory to the GPU, of the faster round, and
    the fraction of `copied_bytes_s`, which copies of pinned memory reach."""
    best = 0.0
    for _ in range(_ROUNDS):
        with Artifact(path) as artifact, Replayer(artifact, num_blocks=2) as replayer:
            stats = replayer.device_stats()
        best = max(best, (stats["weight_bytes"] - stats["offloaded_weight_bytes"]) / (stats["upload_ns"] / 1e9))
    return {"bytes_s": best, "of_copies": best / copied_bytes_s}


def generate(path: Path, most_tokens: int) -> dict[str, Any]:
    """Tokens a second that a batch of the most sequences gets from `LLM.generate`, of the faster round, and whether all
    rounds gave the same tokens. most_tokens: of each output."""
    with Artifact(path) as artifact:
        info = artifact.info
    seqs, length = info.max_num_seqs, info.max_model_len
    prompt, output = min(_PROMPT, length // 4), min(most_tokens, length // 4)
    random = np.random.default_rng(7)
    prompts = [[int(token) for token in random.integers(3, info.vocab_size, prompt)] for _ in range(seqs)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    blocks = 1 + seqs * -(-(prompt + output) // info.block_size)
    seconds, found = [], []
    with LLM(path, num_blocks=blocks, prefix_cache=False) as llm:
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds.append(time.perf_counter() - begin)
            found.append([one.outputs[0].token_ids for one in outputs])
    counted = sum(map(len, found[0]))
    return {
        "sequences": seqs,
        "prompt_tokens": prompt,
        "output_tokens": counted,
        "tokens_s": counted / min(seconds),
        "same": all(one == found[0] for one in found) and counted == seqs * output,
    }
