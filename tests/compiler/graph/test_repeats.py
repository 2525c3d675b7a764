"""Layers that are alike are traced once, and the lowered model is what tracing every layer makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmc.compiler.graph.export import export_model
from llmc.compiler.graph.lower import lower
from llmc.compiler.graph.lowered import to_bytes
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import Decoder, DecoderLayer

from support.falcon_h1_families import OF_FALCON_H1
from support.marks import rare
from support.untrained import model_of


def lowered(model: nn.Module, *, every_layer: bool = False) -> bytes:
    made = to_bytes(lower(export_model(model, every_layer=every_layer)))
    assert made is not None
    return made


class Counted:
    """Counts calls of layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, forward = 0, DecoderLayer.forward

        def counted(layer: DecoderLayer, x: Tensor, step: StepInputs) -> Tensor:
            self.calls += 1
            return forward(layer, x, step)

        monkeypatch.setattr(DecoderLayer, "forward", counted)

    def take(self) -> int:
        calls, self.calls = self.calls, 0
        return calls


# Windows and two rotary tables in turn; a first layer without experts; generic ops alone beside attention; layers with
# two layers of the KV cache.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window_pattern": 2}),
        rare("glm4_moe", {"num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1}),
        ("llama", {}),
        rare("falcon_h1", {**OF_FALCON_H1["falcon_h1"][1], "num_key_value_heads": 2, "head_dim": 16}),
    ],
)
def test_copies_are_what_tracing_makes(
    case: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    model = model_of(case, tmp_path, 4 if case == "glm4_moe" else 6, **fields)
    short = lowered(model)
    few = counted.take()
    assert short == lowered(model, every_layer=True)
    assert few < counted.take()
    deeper = model_of(case, tmp_path / "deeper", 12, **fields)
    export_model(deeper)
    assert counted.take() == few


def test_rows_between_layers_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a drafting head reads lie between layers of which most are not traced."""
    counted = Counted(monkeypatch)
    config = replace(model_of("llama", tmp_path, 12).config, states="left", states_layers=(2, 6, 9), states_size=32)
    with torch.device("meta"):
        model = Decoder(config, "bf16", 64)
    short = lowered(model)
    assert counted.take() < 6
    assert short == lowered(model, every_layer=True)
    assert short != lowered(moved(model, (2, 6, 8)))


def moved(model: Decoder, layers: tuple[int, ...]) -> Decoder:
    with torch.device("meta"):
        return Decoder(replace(model.config, states_layers=layers), "bf16", 64)


class ByNumber(DecoderLayer):
    """Makes more of its number than a layer may."""

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        return super().forward(x * (1.0 + self.attention.layer), step)


class OddByNumber(DecoderLayer):
    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        made = super().forward(x, step)
        return made + x if self.attention.layer == 2 else made


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByNumber, OddByNumber])
def test_layers_that_differ_in_secret_are_all_traced(kind: type[DecoderLayer], tmp_path: Path) -> None:
    model = model_of("llama", tmp_path, 3)
    with torch.device("meta"):
        model.layers = nn.ModuleList(kind(model.config, i, "bf16") for i in range(3))
    assert lowered(model) == lowered(model, every_layer=True)
