"""A Mamba-2 mixer in place of attention or beside it (https://arxiv.org/abs/2405.21060): each head has a matrix as its
state, to which a token adds its input in one direction, and which it reads in another."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import delta_ops, mamba_ops, ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.convolution import Convolution
from llmc.models.blocks.delta_net import ResultNorm
from llmc.models.blocks.layers import Block, Linear, empty
from llmc.models.blocks.norms import over_root_mean_square
from llmc.models.config import ModelConfig
from llmc.models.mamba import Mamba2


class Mamba2Mixer(Block):
    """inputs: [inputs and directions, gate, steps, D]. decay, step_bias, skip: float32 [H]; the decay is below 0.
    norm: None if results are not normed. out: [D, H head_dim]."""

    def __init__(self, config: ModelConfig, net: Mamba2, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer, self.net, self.act_dtype = config.state_layer(layer), net, act_dtype
        self.eps = config.norm_eps if net.norm_eps is None else net.norm_eps
        hidden = config.hidden_size
        self.inputs = Linear(net.channels + net.size + net.heads, hidden, net.bias, act_dtype)
        self.convolution = Convolution(net.channels, net.taps, net.conv_bias)
        self.decay, self.step_bias, self.skip = (empty(net.heads) for _ in range(3))
        self.norm = None if net.norm == "none" else ResultNorm(net.size)
        self.out = Linear(hidden, net.size, net.has_out_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        net = self.net
        made = self.inputs(x)
        xbc = delta_ops.short_conv(
            made, self.convolution.weight, *step.of_states, self.layer, net.taps, bias=self.convolution.bias
        )
        gate, steps = made[:, net.channels : -net.heads], self._steps(made[:, -net.heads :])
        read = mamba_ops.selective_state(xbc, steps, self.skip, *step.of_states, self.layer, net.groups, net.state_size)
        gate = _scaled(gate, net.gate_scale)
        gate = gate * torch.sigmoid(gate)
        made = self._normed(read) * gate if net.norm == "read" else self._normed(read * gate)
        made = _scaled(made, net.out_scale)
        return self.out(made.to(ops.torch_act_dtype(self.act_dtype)), residual)

    def _normed(self, x: Tensor) -> Tensor:
        """float32 [T, H head_dim]: each group by itself."""
        if self.norm is None:
            return x
        parts = over_root_mean_square(x.view(x.shape[0], self.net.groups, -1), self.eps)
        return parts.reshape(x.shape) * self.norm.weight

    def _steps(self, steps: Tensor) -> Tensor:
        """float32 [T, H] → float32 [T, 2 H]: the steps of heads, and what the state keeps."""
        steps = _scaled(steps, self.net.step_scale) + self.step_bias
        # softplus
        steps = torch.clamp(steps, min=0.0) + torch.log(1.0 + torch.exp(-torch.abs(steps)))
        if self.net.least_step > 0.0 or self.net.most_step is not None:
            steps = torch.clamp(steps, min=self.net.least_step, max=self.net.most_step)
        return torch.cat((steps, torch.exp(self.decay * steps)), dim=-1)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale
