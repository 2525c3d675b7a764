"""A gated short convolution in place of attention: each element of a token is convolved with those of the few tokens
before it, between two gates (https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

from torch import Tensor

from llmc.models import delta_ops, ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.convolution import Convolution
from llmc.models.blocks.layers import Block, Linear
from llmc.models.config import ModelConfig
from llmc.models.short_conv import ShortConv


class GatedShortConv(Block):
    """inputs: [3 channels, D]: the gate of what is convolved, the gate of the result, and what is convolved.
    out: [D, channels]."""

    def __init__(self, config: ModelConfig, conv: ShortConv, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer, self.conv, self.act_dtype = config.kv_layer(layer), conv, act_dtype
        self.inputs = Linear(3 * conv.channels, config.hidden_size, conv.bias, act_dtype)
        self.convolution = Convolution(conv.channels, conv.taps, conv.bias)
        self.out = Linear(config.hidden_size, conv.channels, conv.bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        made, width = self.inputs(x), self.conv.channels
        found = delta_ops.short_conv(
            made[:, :width] * made[:, 2 * width :],
            self.convolution.weight,
            *step.of_states,
            self.layer,
            self.conv.taps,
            self.convolution.bias,
            "none",
            alone=True,
        )
        gated = made[:, width : 2 * width] * found
        return self.out(gated.to(ops.torch_act_dtype(self.act_dtype)), residual)
