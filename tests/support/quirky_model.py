"""A model with plain torch ops between the llmc ops, and what it computes eagerly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from llmc.models import ops, registry
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import Decoder, DecoderLayer
from llmc.models.blocks.layers import Block, Linear
from llmc.models.config import ModelConfig
from llmc.models.eager import as_tensor
from llmc.models.families.family import Family
from llmc.models.families.llama import LLAMA
from llmc.models.loader import load_parameters
from llmc.models.reference import ReferenceCache, use_cache
from llmc.models.sources.registry import open_source
from llmc.models.tables import tables

from support.tiny_models import ModelFields, make_tiny_model

LADDER = "prefill=[1,2]x[16,32],decode=[1,3]x[64]"


CAP = 3.0


class QuirkyMlp(Block):
    """The gate is a tanh GELU, written in torch ops."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        self.act_dtype = act_dtype
        self.down = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, act_dtype)
        self.gate_up = Linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        inner = F.gelu(gate, approximate="tanh") * up
        return self.down(inner.to(ops.torch_act_dtype(self.act_dtype)), residual)


class QuirkyLayer(DecoderLayer):
    """Packed activations are read by generic ops too, and mixed over heads of the hidden state."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        self.mlp = QuirkyMlp(config, act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        assert self.mlp_norm is not None
        normed = self.attention_norm(x)
        x = self.attention(normed, x + 0.1 * normed.float(), step)
        weights = torch.softmax(x.view(x.shape[0], 3, -1), dim=-1).reshape(x.shape)
        x = torch.where(step.positions[:, None] % 2 == 0, x * (1.0 + weights), x - x.mean(-1, keepdim=True))
        return self.mlp(self.mlp_norm(x), x)


class Quirky(Decoder):
    """Scaled embeddings and capped logits."""

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__(config, act_dtype, max_len)
        self.layers = nn.ModuleList(QuirkyLayer(config, i, act_dtype) for i in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start: Tensor,
        sample_index: Tensor,
        token_seq: Tensor,
        state_slots: Tensor | None = None,
        rope_positions: Tensor | None = None,
    ) -> Tensor:
        ropes = tuple(self.get_buffer(name) for name in self.config.rope_tables)
        step = StepInputs(positions, slot_mapping, block_tables, context_lens, query_start, token_seq, ropes)
        x = self.embed(input_ids) * self.config.hidden_size**0.5
        for layer in self.layers:
            x = layer(x, step)
        logits = self.lm_head(self.norm(ops.gather_rows(x, sample_index)))
        return torch.tanh(logits / CAP) * CAP


def family(build: type[Decoder]) -> Family:
    return Family("quirky", LLAMA.read_config, LLAMA.weight_map, build)


def checkpoint(path: Path, **overrides: Unpack[ModelFields]) -> Path:
    """A llama checkpoint under the name of the family."""
    fields: ModelFields = {"num_hidden_layers": 2, **overrides}
    model = make_tiny_model(path, "llama", **fields)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "quirky"}))
    return model


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def eager_logits(model: Path, tokens: list[int], act_dtype: str) -> np.ndarray:
    """float32 [T, V] of the eager module on the checkpoint's weights."""
    source = open_source(model)
    config, length = source.config(), len(tokens)
    module = registry.build_model(config, act_dtype, 128)
    parameters = {p.name: as_tensor(p.value()) for p in load_parameters(config, source.checkpoint(), act_dtype)}
    made = {name: as_tensor(value) for name, value in tables(config, 128)}
    if "lm_head.weight" in module.state_dict():  # also where it is the embedding
        parameters.setdefault("lm_head.weight", parameters["embed.weight"])
    module.load_state_dict({**parameters, **made}, strict=True)
    cache = ReferenceCache.of(config, 8, 32, ops.torch_act_dtype(act_dtype))
    with torch.no_grad(), use_cache(cache):
        at = torch.arange(length, dtype=torch.int32)
        blocks = torch.arange(1, 8, dtype=torch.int32)[None]
        same = torch.zeros(length, dtype=torch.int32)
        logits: NDArray[np.float32] = module(
            ints(*tokens), at, at + 32, blocks, ints(length), ints(0, length), at, same
        ).numpy()
    return logits
