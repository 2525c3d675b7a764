"""Linear layers: weights in the activation dtype, biases float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmc.models import ops


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A frozen parameter without values, on the default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Block(nn.Module):
    """A module that returns one tensor, which torch's own class cannot express."""

    __call__: Callable[..., Tensor]


class RepeatedBlock(Block):
    """A repeated block; the compiler traces only some of several like ones.

    Its first argument is the hidden state; it returns the next one, of equal shape, and has no side effects. The
    attribute `layer` of its modules is its number. It serves only as the `layer` argument of llmc ops.
    input_is_shared: others also read or change the hidden state between it and the block before.
    """

    input_is_shared = False


class Projection(Block):
    """weight: [N, K] in the activation dtype. bias: float32 [N] or None."""

    bias: Tensor | None

    def __init__(self, num_out: int, num_in: int, bias: bool, act_dtype: str) -> None:
        super().__init__()
        self.weight = empty(num_out, num_in, dtype=ops.torch_act_dtype(act_dtype))
        self.register_parameter("bias", empty(num_out) if bias else None)


class Linear(Projection):
    """One matrix."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """act [T, K], residual float32 [T, N] → float32 [T, N]."""
        return ops.linear(x, self.weight, self.bias, residual)


class GatedLinear(Projection):
    """Two stacked matrices of I rows each: gate, then up."""

    def __init__(self, num_out: int, num_in: int, bias: bool, act_dtype: str, activation: str = "silu") -> None:
        """num_out: I. activation: one of `models.activations`."""
        super().__init__(2 * num_out, num_in, bias, act_dtype)
        self.act_dtype, self.activation = act_dtype, activation

    def forward(self, x: Tensor) -> Tensor:
        """act [T, K] → act [T, I]: activation(gate) · up."""
        return ops.gated_linear(x, self.weight, self.bias, act_dtype=self.act_dtype, activation=self.activation)


class ActivatedLinear(Projection):
    """One matrix, whose result passes an activation."""

    def __init__(self, num_out: int, num_in: int, bias: bool, act_dtype: str, activation: str) -> None:
        """activation: one of `models.activations`."""
        super().__init__(num_out, num_in, bias, act_dtype)
        self.act_dtype, self.activation = act_dtype, activation

    def forward(self, x: Tensor) -> Tensor:
        """act [T, K] → act [T, N]."""
        return ops.activated_linear(x, self.weight, self.bias, act_dtype=self.act_dtype, activation=self.activation)
