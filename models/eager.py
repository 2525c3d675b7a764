"""A whole model with weights, run eagerly by torch: the reference for compiled models."""

from __future__ import annotations

from pathlib import Path

import torch

from llmc.models.blocks.decoder import Decoder
from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES, Array
from llmc.models.loader import load_parameters
from llmc.models.registry import build_model
from llmc.models.sources.base import ModelSource
from llmc.models.sources.registry import open_source
from llmc.models.tables import tables


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor that shares the array's memory and bits."""
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def load_model(path: str | Path, act_dtype: str = "f32", max_len: int | None = None, task: str = "auto") -> Decoder:
    """The whole model on the CPU. max_len: in tokens; None for max_position_embeddings. task: see `models/tasks.py`."""
    source = open_source(path, task=task)
    return load_source(source, source.config(), act_dtype, max_len)


def load_source(source: ModelSource, config: ModelConfig, act_dtype: str, max_len: int | None = None) -> Decoder:
    """The same of an opened model. config: the source's, or one that computes more with the same weights."""
    length = max_len or config.max_position_embeddings
    with torch.device("meta"):
        model = build_model(config, act_dtype, length)
    state = {p.name: as_tensor(p.value()) for p in load_parameters(config, source.checkpoint(), act_dtype)}
    tied = config.tie_word_embeddings and config.pooled is None
    if tied:
        state["lm_head.weight"] = state["embed.weight"]
    state |= {name: as_tensor(value) for name, value in tables(config, length)}
    model.load_state_dict(state, strict=True, assign=True)
    if tied:
        model.lm_head.weight = model.embed.weight
    return model.eval()
