"""Compiled models that see images, compared with transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.binding.encoder import Encoder
from llmc.runtime.binding.placed_rows import PlacedRows

from support.engine_driver import bits, drive, greedy, random_ids
from support.towers import PLACEHOLDER, SIZES, logits_with_rows, on_axes, patches_of, pixels_of, rows_of_transformers


def check_rows(family: str, model: Path, tower: Artifact, bound: float, **options: Any) -> None:
    """Rows of images of all sizes. bound: of differences over the largest number. options: of the device."""
    with Encoder(tower, **options) as encoder:
        for size in SIZES[family]:
            pixels = pixels_of(size)
            patches, expected = patches_of(model, pixels), rows_of_transformers(model, pixels)
            found = encoder.encode(patches.rows, patches.places, patches.first)
            assert np.abs(found - expected).max() < bound * np.abs(expected).max(), size


def _with_rows(
    tokens: list[int], first: int, rows: NDArray[np.float32], axes: Mapping[str, Any]
) -> tuple[list[int], list[PlacedRows]]:
    """A prompt with rows before token `first` of a text. axes: of `on_axes`."""
    name = hashlib.sha256(rows.tobytes()).digest()
    return [*tokens[:first], *[PLACEHOLDER] * len(rows), *tokens[first:]], [PlacedRows(first, rows, name, **axes)]


def check_placed(family: str, model: Path, text: Artifact, tower: Artifact, **options: Any) -> None:
    """Rows of the tower in a prompt that is longer than a step, alone and next to other texts, with and without rows.

    text: of float32, so that greedy tokens do not hinge on rounding. options: of the device.
    """
    patches = patches_of(model, pixels_of(SIZES[family][-1], seed=5))
    with Encoder(tower, **options) as encoder:
        rows = np.concatenate(3 * [encoder.encode(patches.rows, patches.places, patches.first)])
    params, plain, at = greedy(6, num_logprobs=2), random_ids(4, 21), 5
    axes, of_few = on_axes(family, SIZES[family][-1], times=3), on_axes(family, (8, 16))
    prompt, placed = _with_rows(random_ids(3, 12), at, rows, axes)
    short, few = _with_rows(random_ids(5, 9), 2, rows[:2], of_few)
    with Engine(text, num_blocks=40, **options) as engine:
        ((alone,),) = drive(engine, [(prompt, params)], placed={0: placed})
        requests = [(plain, params), (prompt, params), (short, params)]
        together = [outputs[0] for outputs in drive(engine, requests, placed={1: placed, 2: few})]
    assert bits(together[1]) == bits(alone)
    logits = logits_with_rows(model, prompt + alone.ids, rows, at, **axes)[len(prompt) - 1 : -1].astype(np.float64)
    assert alone.ids == logits.argmax(-1).tolist()
    np.testing.assert_allclose(alone.logprobs, logits.max(-1) - np.log(np.exp(logits).sum(-1)), atol=1e-4)
    expect = [(together[0], plain, rows[:0], 0, {}), (together[2], short, rows[:2], 2, of_few)]
    for output, tokens, of_it, first, its in expect:
        expected = logits_with_rows(model, tokens + output.ids, of_it, first, **its)[len(tokens) - 1 : -1]
        assert output.ids == expected.argmax(-1).tolist()
