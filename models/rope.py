"""The rotary table: float32 frequencies and angles as in transformers, with correctly rounded cosines and sines, so
that the table is identical on every machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.models.errors import ModelError
from llmc.models.rope_fields import ROPE_TYPES
from llmc.models.rotary import Rope, RopeScaling

_F32 = np.float32
Array = NDArray[Any]


def cos_sin_table(rope: Rope, max_len: int) -> Array:
    """float32 [max_len, dim]: cosines in the first half of a row, sines in the second, for positions 0, 1, ….

    Includes the attention factor of yarn and longrope. max_len fixes dynamic (NTK) scaling: within the original context
    it is plain; beyond, frequencies are those of a text of max_len tokens (likewise for ntk_steps). longrope then uses
    its long factors. docs/adding-a-model.md says why.
    Raises ModelError on an unknown rope type.
    """
    inv_freq, factor = checked_frequencies(rope, max_len)
    # Angles in float32; only cosines and sines are computed in float64, then rounded once.
    angles = (np.arange(max_len, dtype=_F32)[:, None] * inv_freq).astype(np.float64)
    return np.concatenate((np.cos(angles).astype(_F32), np.sin(angles).astype(_F32)), axis=-1) * _F32(factor)


def checked_frequencies(rope: Rope, max_len: int) -> tuple[Array, float]:
    """(inverse frequencies float32 [dim / 2], factor of cos and sin), checked.

    Raises ModelError unless they and all angles below position max_len are finite.
    """
    if max_len < 1:
        raise ModelError(f"a rotary table of {max_len} positions was asked for; it needs at least 1")
    try:
        with np.errstate(all="ignore"):
            inv_freq, factor = _frequencies(rope, max_len)
            finite = bool(np.isfinite(inv_freq * _F32(max_len)).all()) and bool(np.isfinite(_F32(factor)))
    except (ArithmeticError, ValueError):
        finite = False
    if not finite:
        raise ModelError(
            f"config.json: rope_theta {rope.theta} with rope scaling {rope.scaling} gives angles that "
            "are not finite; correct its rope fields"
        )
    return inv_freq, factor


def _powers(base: float, dim: int) -> Array:
    """base ** (2 i / dim), float32 [dim / 2], correctly rounded."""
    exponents = np.arange(0, dim, 2).astype(_F32) / _F32(dim)
    return np.power(float(base), exponents.astype(np.float64)).astype(_F32)


def _inverse(base: float, dim: int) -> Array:
    return _F32(1) / _powers(base, dim)


def _frequencies(rope: Rope, max_len: int) -> tuple[Array, float]:
    """(inverse frequencies float32 [dim / 2], factor of cos and sin)."""
    theta, dim, scaling = rope.theta, rope.dim, rope.scaling
    if theta is None:
        return np.zeros(dim // 2, _F32), 1.0
    if scaling is None:
        return _inverse(theta, dim), 1.0
    match scaling.rope_type:
        case "linear":
            return _inverse(theta, dim) / _F32(scaling.factor), 1.0
        case "dynamic":
            return _inverse(_dynamic_base(theta, dim, scaling, max_len), dim), 1.0
        case "llama3":
            return _llama3(_inverse(theta, dim), scaling), 1.0
        case "yarn":
            return _yarn(theta, dim, scaling)
        case "ntk_steps":
            return _ntk_steps(theta, dim, scaling, max_len)
        case "factors":
            return _inverse(theta, dim) / _factors(scaling.frequency_factors, dim), 1.0
        case "proportional":
            return _inverse(theta, scaling.head_dim or dim)[: dim // 2] / _F32(scaling.factor), 1.0
        case "longrope":
            is_long = max_len > scaling.original_max_position_embeddings
            factors = _factors(scaling.long_factors if is_long else scaling.frequency_factors, dim)
            return _F32(1) / (factors * _powers(theta, dim)), _longrope_factor(scaling)
    raise ModelError(f"rope type {scaling.rope_type!r} is not supported; one of {', '.join(ROPE_TYPES)}")


def _factors(factors: tuple[float, ...] | None, dim: int) -> Array:
    found = np.array(factors, _F32)
    if found.shape != (dim // 2,):
        raise ValueError(f"{found.shape} factors of {dim // 2} frequencies")
    return found


def _longrope_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def _dynamic_base(theta: float, dim: int, scaling: RopeScaling, max_len: int) -> float:
    original = scaling.original_max_position_embeddings
    if max_len <= original:
        return theta
    if dim == 2:
        raise ModelError("dynamic rope scaling needs more than 2 rotated elements in a head")
    # Each step is rounded to float32: transformers takes the length from a tensor.
    ratio = _F32(scaling.factor) * _F32(max_len) / _F32(original) - _F32(scaling.factor - 1)
    return float(_F32(theta) * _F32(float(ratio) ** (dim / (dim - 2))))


def _ntk_steps(theta: float, dim: int, scaling: RopeScaling, max_len: int) -> tuple[Array, float]:
    """The base grows in doubling steps beyond the original context.

    Texts are assumed at least as long as in training, factor times the original; with mscale, cosines grow beyond that.
    """
    original = scaling.original_max_position_embeddings
    trained = round(original * scaling.factor)
    length = max(max_len, trained)
    # The authors' formula, independent of rounding in logarithms of powers of two.
    steps = max(2 ** math.ceil(math.log(length / original, 2) + 1) - 1, 1)
    grown = 1.0 if scaling.mscale is None else 1.0 + 0.1 * scaling.mscale * math.log(length / trained)
    return _inverse(theta * steps ** (dim / (dim - 2)), dim), grown


def _llama3(inv_freq: Array, scaling: RopeScaling) -> Array:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is None or high is None:
        raise ModelError("llama3 rope scaling needs low_freq_factor and high_freq_factor")
    original = scaling.original_max_position_embeddings
    wavelength = _F32(2 * math.pi) / inv_freq
    long, short = wavelength > _F32(original / low), wavelength < _F32(original / high)
    scaled = np.where(long, inv_freq / _F32(scaling.factor), inv_freq)
    smooth = (_F32(original) / wavelength - _F32(low)) / _F32(high - low)
    smoothed = (_F32(1) - smooth) * scaled / _F32(scaling.factor) + smooth * scaled
    return np.where(~short & ~long, smoothed, scaled)


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> tuple[Array, float]:
    def correction(rotations: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(wavelengths)) / (2 * math.log(theta))

    low, high = correction(scaling.beta_fast or 32), correction(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    powers = _powers(theta, dim)
    ramp = np.clip((np.arange(dim // 2, dtype=_F32) - _F32(low)) / _F32(high - low), _F32(0), _F32(1))
    keep = _F32(1) - ramp
    inv_freq = _F32(1) / (_F32(scaling.factor) * powers) * (_F32(1) - keep) + _F32(1) / powers * keep
    return inv_freq, _yarn_factor(scaling)


def _yarn_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
