"""What the definitions share: norms, rotations, attention over a whole text. T tokens, H heads of d elements."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]
"""A config.json."""


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class GatedMlp(nn.Module):
    """As Llama calls it."""

    def __init__(self, hidden: int, inner: int, *, down_bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=down_bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


def _angles(count: int, dim: int, theta: float) -> Tensor:
    """[T, 1, dim / 2]."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    return torch.outer(torch.arange(count).float(), frequencies)[:, None]


def steps_of_length(length: int, original: int) -> float:
    """How much of itself the rotary base is, to the power of d / (d − 2), for a text of so many tokens."""
    return max(2.0 ** math.ceil(math.log(length / original, 2) + 1) - 1, 1)


def rotate_halves(x: Tensor, theta: float) -> Tensor:
    """[T, H, d]: element i is rotated with element i + d / 2."""
    angles = _angles(len(x), x.shape[-1], theta)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def rotate_pairs(x: Tensor, theta: float, dim: int) -> Tensor:
    """[T, H, d]: of the first `dim` elements the even ones with those that follow them."""
    angles = _angles(len(x), dim, theta)
    even, odd = x[..., :dim:2], x[..., 1:dim:2]
    turned = torch.stack((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), dim=-1)
    return torch.cat((turned.flatten(-2), x[..., dim:]), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention, [T, H, d] and [T, fewer heads, d] → [T, H d]. bias: [H, 1, T] by the key."""
    repeats = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    made: Tensor = (weights @ v).transpose(0, 1).flatten(1)
    return made
