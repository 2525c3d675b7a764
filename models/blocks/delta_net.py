"""A gated delta net in place of attention (https://arxiv.org/abs/2412.06464): each head has a matrix as its state,
into which it writes values by keys, and from which queries read."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import delta_ops, ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.convolution import Convolution
from llmc.models.blocks.layers import Block, Linear, empty
from llmc.models.blocks.norms import over_root_mean_square
from llmc.models.config import ModelConfig
from llmc.models.delta_net import DeltaNet


class ResultNorm(Block):
    """weight: float32 [value_dim], for all heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty(size)


class GatedDeltaNet(Block):
    """inputs: [queries, keys, values and gate, D]. gates: [2 H, D], of each head the strength of a write, then the step
    by which its state decays. decay, step_bias: float32 [H]; the decay is below 0. out: [D, H value_dim]."""

    def __init__(self, config: ModelConfig, net: DeltaNet, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer, self.net, self.eps, self.act_dtype = config.kv_layer(layer), net, config.norm_eps, act_dtype
        hidden = config.hidden_size
        self.inputs = Linear(net.channels + net.value_size, hidden, False, act_dtype)
        self.gates = Linear(2 * net.value_heads, hidden, False, act_dtype)
        self.convolution = Convolution(net.channels, net.taps)
        self.decay, self.step_bias = empty(net.value_heads), empty(net.value_heads)
        self.norm = ResultNorm(net.value_dim)
        self.out = Linear(hidden, net.value_size, False, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        net = self.net
        made = self.inputs(x)
        qkv = delta_ops.short_conv(made, self.convolution.weight, *step.of_states, self.layer, net.taps)
        read = delta_ops.delta_rule(
            qkv, self._gates(x), *step.of_states, self.layer, net.key_heads, net.key_dim, net.tiled
        )
        heads = over_root_mean_square(read.view(read.shape[0], net.value_heads, net.value_dim), self.eps)
        gate = made[:, net.channels :]
        gated = (heads * self.norm.weight).reshape(read.shape) * (gate * torch.sigmoid(gate))
        return self.out(gated.to(ops.torch_act_dtype(self.act_dtype)), residual)

    def _gates(self, x: Tensor) -> Tensor:
        """act [T, D] → float32 [T, 2 H]: the strength of writes, and what the state keeps."""
        writes, steps = self.gates(x).chunk(2, dim=-1)
        steps = steps + self.step_bias
        # softplus
        steps = torch.clamp(steps, min=0.0) + torch.log(1.0 + torch.exp(-torch.abs(steps)))
        return torch.cat((torch.sigmoid(writes), torch.exp(self.decay * steps)), dim=-1)
