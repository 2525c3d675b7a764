"""A tiny gpt-oss whose experts are in MXFP4, as published ones are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from llmc.models.convert import Array

from support.families import CASES
from support.tiny_models import make_tiny_model

_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def _mxfp4(weight: Array, tensors: dict[str, Array], name: str) -> Array:
    """Stores a weight [E, N, K] as gpt-oss does; what it stands for then, float32."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    groups = np.ascontiguousarray(weight).reshape(*weight.shape[:2], -1, 32)
    exponent = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int32)
    scale = np.exp2(exponent.astype(np.float32))[..., None]
    codes = np.abs(groups[..., None] / scale[..., None] - table).argmin(-1).astype(np.uint8)
    tensors[f"{name}_blocks"] = codes[..., ::2] | (codes[..., 1::2] << 4)
    tensors[f"{name}_scales"] = (exponent + 127).astype(np.uint8)
    return np.asarray(table[codes] * scale).reshape(weight.shape)


def make_mxfp4_model(folder: Path) -> tuple[Path, Path]:
    """The model with the numbers as floats, and as stored. Each row has two groups or more."""
    _, overrides = CASES["gpt_oss"]
    sizes = {**overrides, "hidden_size": 64, "intermediate_size": 96}
    floats = make_tiny_model(folder / "floats", "gpt_oss", **sizes)
    config, tensors = json.loads((floats / "config.json").read_text()), load_file(floats / "model.safetensors")
    stored = {name: value for name, value in tensors.items() if not name.endswith(_EXPERTS)}
    for name in tensors.keys() - stored.keys():
        rounded = _mxfp4(tensors[name].transpose(0, 2, 1), stored, name)
        tensors[name] = np.ascontiguousarray(rounded.transpose(0, 2, 1))
    save_file(tensors, floats / "model.safetensors")
    path = folder / "mxfp4"
    path.mkdir()
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored, path / "model.safetensors")
    return floats, path
