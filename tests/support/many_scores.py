"""Llama 4 of dense layers with all that attention knows: a family that only tests have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from llmc.models.alibi import paper_slopes
from llmc.models.config import Alibi, ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.llama4 import LLAMA4_TEXT
from llmc.models.fields import Fields
from llmc.models.read_config import load_config

from support.families import CASES
from support.tiny_models import make_tiny_model


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    config = LLAMA4_TEXT.read_config(fields, generation)
    return replace(config, sinks=True, attention_cap=2.0, alibi=Alibi(paper_slopes(config.num_heads)))


WITH_ALL = Family("many_scores", read_config, LLAMA4_TEXT.weight_map, harmless=LLAMA4_TEXT.harmless)


def checkpoint_with_all(path: Path, **fields: Any) -> Path:
    """A tiny model of `WITH_ALL`, which llmc must have."""
    family, dense = CASES["llama4_text-dense"]
    model = make_tiny_model(path, family, **{**dense, **fields})
    said = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**said, "model_type": WITH_ALL.model_type}))
    tensors, config = load_file(model / "model.safetensors"), load_config(model)
    rng = np.random.default_rng(6)
    for layer in range(config.num_layers):
        tensors[f"model.layers.{layer}.self_attn.sinks"] = rng.normal(size=config.num_heads).astype(np.float32)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model
