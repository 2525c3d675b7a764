"""Heads of queries, keys and values: their elements in a row, and their rotation by positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.models.convert import DTYPES, Array
from llmc.models.rope import checked_frequencies
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.sources.onnx.probe import Probe
from llmc.models.sources.onnx.rows import Flat, Term, Unrecognised
from llmc.models.sources.onnx.terms import parts_of

_CLOSE, _CLOSE_IN_SHORT = 1e-4, 8e-3
"""Tolerances for cosines and sines; the second for graphs that store them in 16 bits."""
_SHORT = (DTYPES["f16"], DTYPES["bf16"])


@dataclass(frozen=True, eq=False)
class Heads:
    """source: the term whose elements they are.
    idx: int [heads, head_dim], the elements; rotated ones first in llmc's order: firsts of pairs, then seconds.
    order: int [head_dim], their positions in the graph's heads.
    angles: float64, rotation per position of each pair, descending. amplitude: factor of cosines and sines. factor: of
    all other elements; 1 if there are none.
    bias: float32 [heads, head_dim], added; None for none.
    is_short: angles are known only to 16-bit precision.
    """

    source: Term
    idx: Array
    order: Array
    angles: Array
    amplitude: float
    factor: float
    bias: Array | None = None
    is_short: bool = False

    @property
    def num_heads(self) -> int:
        return int(self.idx.shape[0])


def read_heads(flat: Flat, head_dim: int, probe: Probe) -> Heads:
    """Raises Unrecognised for rows that are not heads, or are rotated otherwise."""
    parts = parts_of(flat)
    if not parts or any(part.term is not parts[0].term for part in parts):
        raise Unrecognised("attends to sums of several layers")
    source, heads = parts[0].term, flat.size // head_dim
    if len(parts) == 1 and parts[0].coef.ndim == 1:
        if parts[0].factor is None or (flat.const is not None and flat.const.ndim != 1):
            raise Unrecognised("scales each element of a head by a number of its own")
        bias = None if flat.const is None else flat.const.reshape(heads, head_dim)
        idx = parts[0].idx.reshape(heads, head_dim)
        return Heads(source, idx, np.arange(head_dim), np.zeros(0), 1.0, parts[0].factor, bias)
    if flat.const is not None:
        raise Unrecognised("adds something to rotated heads")
    coefs = np.stack([np.broadcast_to(part.coef, (probe.batch * probe.tokens, flat.size)) for part in parts])
    # The first text has no padding.
    coefs = coefs[:, : probe.tokens].astype(np.float64)
    sources = np.stack([part.idx for part in parts])
    used = coefs.any(axis=1)
    turns = (coefs != coefs[:, :1]).any(axis=(0, 1))
    if (used.sum(0) != np.where(turns, 2, 1)).any():
        raise Unrecognised("mixes elements of a head otherwise than rotary embeddings do")
    slots = np.argsort(~used, axis=0, kind="stable")[:2]
    if len(slots) < 2:
        raise Unrecognised("scales heads by their position")
    source_of = np.take_along_axis(sources, slots, 0).reshape(2, heads, head_dim)
    coef_of = np.take_along_axis(coefs, slots[:, None], 0).reshape(2, probe.tokens, heads, head_dim)
    if not np.array_equal(coef_of, np.broadcast_to(coef_of[:, :, :1], coef_of.shape)):
        raise Unrecognised("rotates heads differently")
    return _rotated(source, source_of, coef_of[:, :, 0], turns.reshape(heads, head_dim)[0], probe)


@dataclass(frozen=True)
class _Pair:
    """Head positions that are rotated together. first_slot, second_slot: which of two sources is the position's own."""

    first: int
    second: int
    first_slot: int
    second_slot: int
    angle: float
    amplitude: float


def _rotated(source: Term, source_of: Array, coefs: Array, turns: Array, probe: Probe) -> Heads:
    """source_of [2, heads, head_dim]; coefs [2, tokens, head_dim]."""
    one = 1 - probe.past
    is_short = any(np.array_equal(coefs, coefs.astype(dtype).astype(np.float64)) for dtype in _SHORT)
    close = _CLOSE_IN_SHORT if is_short else _CLOSE
    pairs = [_pair(a, b, source_of[:, 0], coefs[:, one], close) for a, b in _partners(source_of[:, 0], turns)]
    pairs.sort(key=lambda pair: -pair.angle)
    own = source_of[0].copy()
    for pair in pairs:
        for place, slot, other in (
            (pair.first, pair.first_slot, pair.second),
            (pair.second, pair.second_slot, pair.first),
        ):
            other_slot = pair.second_slot if other == pair.second else pair.first_slot
            own[:, place] = source_of[slot, :, place]
            if not np.array_equal(source_of[1 - slot, :, place], source_of[other_slot, :, other]):
                raise Unrecognised("rotates elements of different heads together")
    _check_angles(pairs, coefs, probe, close)
    amplitude = pairs[0].amplitude
    rest = np.flatnonzero(~turns)
    factors = coefs[0, 0, rest]
    if (factors != factors[:1]).any():
        raise Unrecognised("scales elements of a head that are not rotated by several numbers")
    order = np.array([*(p.first for p in pairs), *(p.second for p in pairs), *rest], np.int64)
    factor = float(factors[0]) if len(factors) else 1.0
    angles = np.array([p.angle for p in pairs])
    return Heads(source, own[:, order], order, angles, amplitude, factor, is_short=is_short)


def _partners(sources: Array, turns: Array) -> Sequence[tuple[int, int]]:
    """Positions of one head that depend on the same two elements."""
    of: dict[frozenset[int], list[int]] = {}
    for place in np.flatnonzero(turns):
        of.setdefault(frozenset(sources[:, place].tolist()), []).append(int(place))
    if any(len(key) != 2 or len(places) != 2 for key, places in of.items()):
        raise Unrecognised("rotates other groups of elements than pairs")
    return [(a, b) for a, b in of.values()]


def _pair(a: int, b: int, sources: Array, coefs: Array, close: float) -> _Pair:
    """coefs: [2, head_dim] of a token at position 1."""
    slot = 0 if sources[0, b] == sources[0, a] else 1
    matrix = np.array([[coefs[0, a], coefs[1, a]], [coefs[slot, b], coefs[1 - slot, b]]])
    slots = [0, 1 - slot]
    if np.linalg.det(matrix) < 0:
        matrix, slots = matrix[:, ::-1], [1, slot]
    amplitude = math.hypot(matrix[0, 0], matrix[1, 0])
    if abs(amplitude - 1.0) < close / 100:
        amplitude = 1.0
    if abs(matrix[0, 0] - matrix[1, 1]) > close * amplitude or abs(matrix[0, 1] + matrix[1, 0]) > close * amplitude:
        raise Unrecognised("changes pairs of elements otherwise than by a rotation")
    angle = math.atan2(matrix[1, 0], matrix[0, 0])
    if angle < 0:
        return _Pair(b, a, slots[1], slots[0], -angle, amplitude)
    return _Pair(a, b, slots[0], slots[1], angle, amplitude)


def _check_angles(pairs: Sequence[_Pair], coefs: Array, probe: Probe, close: float) -> None:
    """Checks that every token is rotated by its position times the angles."""
    if not pairs:
        raise Unrecognised("scales heads by their position")
    amplitude = pairs[0].amplitude
    for token in range(probe.tokens):
        position = probe.past + token
        for pair in pairs:
            wanted = amplitude * math.cos(position * pair.angle), amplitude * math.sin(position * pair.angle)
            found = coefs[pair.first_slot, token, pair.first], coefs[1 - pair.second_slot, token, pair.second]
            if max(abs(a - b) for a, b in zip(wanted, found, strict=True)) > close * max(1.0, amplitude):
                raise Unrecognised("rotates heads by other angles than multiples of the position")


def rope_of(heads: Heads, stated: Sequence[Rope], max_len: int) -> tuple[Rope, float]:
    """(rotary positions with these angles, their cosine factor). stated: candidates from config.json, preferred if they
    match."""
    dim, angles = 2 * len(heads.angles), heads.angles
    for rope in stated:
        if rope.theta is not None and rope.dim == dim:
            frequencies, factor = checked_frequencies(rope, max_len)
            rtol, atol = (_CLOSE_IN_SHORT, 1e-3) if heads.is_short else (1e-5, 0.0)
            close = math.isclose(factor, heads.amplitude / heads.factor, rel_tol=rtol)
            if close and np.allclose(np.sort(frequencies)[::-1], angles, rtol=rtol, atol=atol):
                return rope, factor
    if heads.is_short:
        raise Unrecognised("has rotary positions in 16 bits that are not those of a config.json beside it")
    powers = np.arange(0, dim, 2) / dim
    base = float(angles[-1] ** (-1 / powers[-1])) if dim > 2 and angles[-1] > 0 else 10000.0
    for digits in (3, 4, 6, 9):
        theta = float(f"{base:.{digits}g}")
        if np.allclose(theta**-powers, angles, rtol=2e-6, atol=0):
            return Rope(theta, dim), 1.0
    theta = 10000.0
    factors = tuple(float(np.float32(f)) for f in theta**-powers / angles)
    return Rope(theta, dim, RopeScaling("factors", 1.0, max_len, frequency_factors=factors)), 1.0
