"""The table of rotary cosines and sines, in the arithmetic of transformers (float32 frequencies and angles)."""

from __future__ import annotations

import math

import torch

from llmc.models.config import ModelConfig, RopeScaling
from llmc.models.errors import ModelError


def cos_sin_table(config: ModelConfig, max_len: int) -> torch.Tensor:
    """float32 [max_len, rotary_dim]: cosines in the first half of a row, sines in the second, for positions 0, 1, ….

    Yarn's attention factor is folded in. Dynamic (NTK) scaling, whose frequencies follow the length of the text
    elsewhere, is fixed by max_len here: plain up to max_position_embeddings, else the frequencies of a text of max_len
    tokens. Raises ModelError on an unknown rope type.
    """
    if max_len < 1:
        raise ModelError(f"a rotary table of {max_len} positions was asked for; it needs at least 1")
    inv_freq, factor = _frequencies(config, max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _inverse(base: float | torch.Tensor, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _frequencies(config: ModelConfig, max_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [rotary_dim / 2], factor of cos and sin)."""
    theta, dim, scaling = config.rope_theta, config.rotary_dim, config.rope_scaling
    if scaling is None:
        return _inverse(theta, dim), 1.0
    match scaling.rope_type:
        case "linear":
            return _inverse(theta, dim) / scaling.factor, 1.0
        case "dynamic":
            return _inverse(_dynamic_base(theta, dim, scaling, max_len), dim), 1.0
        case "llama3":
            return _llama3(_inverse(theta, dim), scaling), 1.0
        case "yarn":
            return _yarn(theta, dim, scaling)
    raise ModelError(f"rope type {scaling.rope_type!r} is not supported; one of default, linear, dynamic, llama3, yarn")


def _dynamic_base(theta: float, dim: int, scaling: RopeScaling, max_len: int) -> float | torch.Tensor:
    original = scaling.original_max_position_embeddings
    if max_len <= original:
        return theta
    if dim == 2:
        raise ModelError("dynamic rope scaling needs more than 2 rotated elements in a head")
    # A tensor, because transformers takes the length from a tensor and so rounds every step to float32.
    length = torch.tensor(max_len)
    return theta * ((scaling.factor * length / original) - (scaling.factor - 1)) ** (dim / (dim - 2))


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is None or high is None:
        raise ModelError("llama3 rope scaling needs low_freq_factor and high_freq_factor")
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    long, short = wavelength > original / low, wavelength < original / high
    scaled = torch.where(long, inv_freq / scaling.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return torch.where(~short & ~long, smoothed, scaled)


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    def correction(rotations: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(wavelengths)) / (2 * math.log(theta))

    low, high = correction(scaling.beta_fast or 32), correction(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    inv_freq = 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv_freq, _yarn_factor(scaling)


def _yarn_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
