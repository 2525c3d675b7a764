"""Models without values: of a family, in any depth, for what depends on nothing but a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmc.models.blocks.decoder import Decoder
from llmc.models.read_config import load_config
from llmc.models.registry import build_model

from support.families import CASES

SMALL = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}


def model_of(case: str, folder: Path, num_layers: int, **overrides: Any) -> Decoder:
    """A case of `families.CASES` with so many layers; overrides: fields of its config in transformers."""
    family, fields = CASES[case]
    CONFIG_MAPPING[family](**{**SMALL, **fields, "num_hidden_layers": num_layers, **overrides}).save_pretrained(folder)
    with torch.device("meta"):
        return build_model(load_config(folder), "bf16", 32)
