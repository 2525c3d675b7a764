"""Token inputs: a vector for each token and layer, which the layer mixes into its result, as in Gemma 3n and Gemma 4.

T tokens, L layers, D hidden size, P elements of a layer's token input, V' tokens that have one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmc.models import ops
from llmc.models.activations import activated
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import BlocksLayer, Decoder, Embedding
from llmc.models.blocks.layers import Block, Linear, RepeatedBlock, empty
from llmc.models.blocks.norms import over_root_mean_square, result_norm
from llmc.models.config import ModelConfig, TokenInputs

_HALF = 2.0**-0.5


def parts(x: Tensor, count: int) -> list[Tensor]:
    """Equal slices of the last axis of x [T, N]; separate slices let the compiler compute each on its own."""
    size = x.shape[-1] // count
    return [x[:, i * size : (i + 1) * size] for i in range(count)]


class TokenInput(Block):
    """What a layer's token input adds to a hidden vector: gate [P, D], out [D, P] and a norm.

    scale: float32 [D] or None.
    """

    scale: Tensor | None

    def __init__(self, config: ModelConfig, size: int, act_dtype: str, *, scaled: bool = False) -> None:
        super().__init__()
        self.activation, self.act_dtype = config.activation, act_dtype
        self.register_parameter("scale", empty(config.hidden_size) if scaled else None)
        self.gate = Linear(size, config.hidden_size, False, act_dtype)
        self.out = Linear(config.hidden_size, size, False, act_dtype)
        self.norm = result_norm(config, act_dtype)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """float32 [T, D], [T, P] → float32 [T, D]."""
        dtype = ops.torch_act_dtype(self.act_dtype)
        scaled = x if self.scale is None else x * self.scale
        gated = activated(self.gate(scaled.to(dtype)), self.activation) * given
        return self.norm(self.out(gated.to(dtype)))


class InputsOfLayers(Block):
    """The token inputs of all layers, concatenated: looked up by id in table [V', L P], plus a projection of the
    embedding."""

    def __init__(self, config: ModelConfig, size: int, vocab: int, act_dtype: str) -> None:
        super().__init__()
        self.config, self.size, self.act_dtype = config, size, act_dtype
        self.vocab = vocab
        width = config.num_layers * size
        self.table = Embedding(vocab, width, act_dtype)
        self.project = Linear(width, config.hidden_size, False, act_dtype)
        self.norm = empty(size)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """float32 [T, D], int32 [T] → float32 [T, L P]."""
        if self.vocab < self.config.vocab_size:
            input_ids = input_ids * (input_ids < self.vocab).to(torch.int32)
        made = self.project(x.to(ops.torch_act_dtype(self.act_dtype))) * (1.0 / math.sqrt(self.config.hidden_size))
        heads = over_root_mean_square(made.view(x.shape[0], -1, self.size), self.config.norm_eps) * self.norm
        return (heads.reshape(made.shape) + self.table(input_ids) * math.sqrt(self.size)) * _HALF


class TokenInputLayer(BlocksLayer):
    """Both blocks, then the layer's token input."""

    def __init__(self, config: ModelConfig, inputs: TokenInputs, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        self.input = TokenInput(config, inputs.size, act_dtype)

    def forward(self, x: Tensor, step: StepInputs, given: Tensor) -> Tensor:
        """float32 [T, D], given float32 [T, P] → float32 [T, D]."""
        x = self.with_blocks(x, step)
        return self.scaled(x + self.input(x, given))


class TokenInputDecoder(Decoder):
    """A decoder whose layers read token inputs."""

    def __init__(self, config: ModelConfig, inputs: TokenInputs, act_dtype: str, max_len: int) -> None:
        self.token_inputs = inputs
        super().__init__(config, act_dtype, max_len)
        self.inputs = InputsOfLayers(config, inputs.size, inputs.vocab, act_dtype)

    def layer(self, number: int, act_dtype: str) -> RepeatedBlock:
        return TokenInputLayer(self.config, self.token_inputs, number, act_dtype)

    def through_layers(self, x: Tensor, input_ids: Tensor, step: StepInputs) -> tuple[Tensor, list[Tensor]]:
        inputs = parts(self.inputs(x, input_ids), len(self.layers))
        for layer, given in zip(self.layers, inputs, strict=True):
            x = layer(x, step, given)
        return x, []
