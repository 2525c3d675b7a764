"""Writes a random checkpoint of a known shape, to which a bundle without weights is applied. Needs only numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.shapes import is_norm, named

_BLOCK = (1 << 24) - 3  # numbers; a prime, which divides no row


def rounded_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bf16 bits of finite numbers, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_random_model(shape: dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors (bf16) to `folder`. Values are small: activations stay finite."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = dict(named(shape))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # A tensor takes its numbers from a random place of one block: those of 8B shapes would take minutes to draw.
    generator = np.random.default_rng(seed)
    block = rounded_to_bf16(generator.standard_normal(_BLOCK, np.float32) * np.float32(0.02))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in sizes.items():
            left = int(np.prod(size))
            if is_norm(name, size):
                file.write(rounded_to_bf16(np.ones(size, np.float32)).tobytes())
                continue
            at = int(generator.integers(_BLOCK))
            while left:
                some = block[at : at + left]
                file.write(some.tobytes())
                at, left = 0, left - len(some)
    # Last, since who finds it takes the model for whole.
    (folder / "config.json").write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
    return folder
