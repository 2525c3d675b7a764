"""How checkpoints may store a layer for multi-token prediction: otherwise than the model's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmc.models.loader import check_checkpoint, load_parameters
from llmc.models.sources.registry import open_head, open_source

from support.families import CASES
from support.mtp_heads import add_mtp
from support.quantized_checkpoints import save_tensors
from support.stored_checkpoints import Integers, gptq_config, gptq_tensors, tensor
from support.tiny_models import make_tiny_model

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
_LAYER = "model.layers.3."


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A model with biases and experts, whose layers are quantized by GPTQ, and whose own layer for guesses is not."""
    family, fields = CASES["glm4_moe"]
    model = add_mtp(make_tiny_model(tmp_path / "m", family, **{**fields, **_SIZES}))
    _write(model, quantized_layers=3)
    return model


def _write(model: Path, *, quantized_layers: int) -> None:
    found: dict[str, Any] = {}
    for name, value in load_file(model / "model.safetensors").items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else quantized_layers
        linear = value.ndim == 2 and "_proj." in name and "eh_proj" not in name
        if linear and layer < quantized_layers:
            rows, columns = value.shape
            integers = Integers.random(rows, columns, 4, 32, symmetric=False, least_zero=1)
            found |= gptq_tensors(integers, 4, 1, name.removesuffix(".weight"))
        else:
            found[name] = tensor(value)
    save_tensors(model / "model.safetensors", found)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = gptq_config(bits=4, group_size=32, sym=False)
    (model / "config.json").write_text(json.dumps(config))


def _names(model: Path) -> list[str]:
    """Parameters of the head; both the model and the head open."""
    source = open_source(model)
    check_checkpoint(source.config(), source.checkpoint())
    head = open_head(None, source)
    return [p.name for p in load_parameters(head.config(), head.checkpoint(), "f32")]


def test_floats_beside_quantized_layers(quantized: Path) -> None:
    assert "layers.0.mlp.experts.gate_up.weight" in _names(quantized)


def test_a_quantized_layer_with_biases(tmp_path: Path) -> None:
    """Whose biases are no leftovers of a tool, though the model itself does not read them."""
    family, fields = CASES["glm4_moe"]
    model = add_mtp(make_tiny_model(tmp_path / "m", family, **{**fields, **_SIZES}))
    _write(model, quantized_layers=4)
    assert "layers.0.attention.qkv.bias" in _names(model)


def test_stacked_experts_beside_experts_apart(quantized: Path) -> None:
    expected = _names(quantized)
    tensors = load_file(quantized / "model.safetensors")
    prefix = f"{_LAYER}mlp.experts."
    count = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
    of = {
        name: [tensors.pop(f"{prefix}{i}.{name}_proj.weight") for i in range(count)] for name in ("gate", "up", "down")
    }
    tensors[f"{prefix}gate_up_proj"] = np.stack(
        [np.concatenate(pair) for pair in zip(of["gate"], of["up"], strict=True)]
    )
    tensors[f"{prefix}down_proj"] = np.stack(of["down"])
    save_tensors(quantized / "model.safetensors", {name: tensor(value) for name, value in tensors.items()})
    assert _names(quantized) == expected
