"""Gemma 3n's streams count in the tiny models: what breaks them is more than 16 bits round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.streams import LowRank, Updates
from llmc.models.blocks.token_inputs import TokenInput
from llmc.models.convert import Array
from llmc.models.eager import load_model

from support.compiled import random_tokens, relative_error
from support.families import CASES
from support.paged_reference import PagedRunner
from support.sixteen_bits import in_float32
from support.tiny_models import make_tiny_model

Expected = tuple[Path, list[int], Array, float]


def logits(model: Decoder, tokens: list[int]) -> Array:
    found: Array = PagedRunner(model).step([tokens])[0].numpy()
    return found


@pytest.fixture(scope="module", params=["gemma3n_text", "gemma3n_text-tied"])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """(model, tokens, float32 logits [T, V], what bf16 changes of them)."""
    family, overrides = CASES[request.param]
    path = make_tiny_model(tmp_path_factory.mktemp("m"), family, **overrides)
    tokens = random_tokens(515, 32)
    exact = logits(in_float32(path, "bf16"), tokens)
    return path, tokens, exact, relative_error(logits(load_model(path, "bf16"), tokens), exact)


def unpredicted(self: Updates, streams: Sequence[Tensor]) -> list[Tensor]:
    return list(streams)


def corrected_alike(self: Updates, predicted: Sequence[Tensor], made: Tensor) -> list[Tensor]:
    return [stream + (made - predicted[0]) for stream in predicted]


def of_other_kinds(self: Updates, x: Tensor, matrix: Tensor) -> Tensor:
    kinds = torch.tanh(self.router(self.norm(x)) * (1.0 / self.hidden_size))
    return (kinds.flip(-1)[:, None, :] * matrix).sum(-1)


BREAKS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "predicted": (Updates, "predicted", unpredicted),
    "corrected": (Updates, "corrected", corrected_alike),
    "factors": (Updates, "_factors", of_other_kinds),
    "low-rank": (LowRank, "forward", lambda self, x: x.float()),
    "input": (TokenInput, "forward", lambda self, x, given: torch.zeros_like(x)),
}


@pytest.mark.parametrize("part", BREAKS)
def test_a_break_is_more_than_roundings(part: str, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """By three times what tests in 16 bits let pass."""
    path, tokens, exact, rounded = expected
    monkeypatch.setattr(*BREAKS[part])
    assert relative_error(logits(load_model(path, "bf16"), tokens), exact) > 3 * max(3e-2, rounded)
