"""Writes the outputs of a step's commands to files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmc.runtime.debug.diff import check_tokens
from llmc.runtime.debug.replay import CommandReplay


def dump_step(artifact: Path, prompt: Sequence[int], step: int, output: Path, only: str = "") -> int:
    """Runs `prompt`, then `step` greedy tokens; writes each tensor of the last step to `output` as float32 .npy, with
    index.json. only: restricts to names that contain this text. Returns the number of tensors."""
    replay = CommandReplay(artifact, len(prompt) + step)
    check_tokens(prompt, replay.vocab_size)
    tokens = list(prompt)
    for _ in range(step):
        tokens = [int(list(replay.step(tokens)[1])[-1].array[-1].argmax())]
    graph, values = replay.step(tokens)
    entries = []
    for value in values:
        if only not in value.name:
            continue
        output.mkdir(parents=True, exist_ok=True)
        file = f"{value.command:04d}-{re.sub(r'[^A-Za-z0-9_.]', '_', f'{value.op}-{value.name}')}.npy"
        np.save(output / file, value.array)
        entries.append(
            {
                "file": file,
                "command": value.command,
                "op": value.op,
                "kernel": value.kernel,
                "name": value.name,
                "layer": value.layer,
                "shape": list(value.array.shape),
            }
        )
    if entries:
        index = {"graph": graph, "tokens": tokens, "tensors": entries}
        (output / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    return len(entries)
