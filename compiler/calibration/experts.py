"""Rounds a layer's experts one at a time, calibrated on the inputs of the tokens that chose each.

Memory holds the second moments of one expert at a time. An expert that few tokens chose is also calibrated on other
tokens, at a lower weight; its own inputs alone would not span their space. One that hardly any token chose is rounded
to nearest: a method would fit it to the inputs of other experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.compiler.calibration.plan import DOWN, GATE_UP, Linear
from llmc.compiler.calibration.rounding import RoundedLayer, Rounder
from llmc.compiler.calibration.running import Floats, LayerRunner, Moments, Routed, Values
from llmc.models.config import Experts
from llmc.models.expert_ops import expert_inner
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.methods.awq import ALPHAS, channel_scales, powers_of_two

_NORM = "mlp_norm.weight"
_SHARED = "mlp.shared.gate_up"
_READERS = ("mlp.router", "mlp.shared_gate", _SHARED, GATE_UP)
"""The layers that read what `_NORM` makes."""
_ROWS = 4096
_OF_OTHERS = np.float32(0.1)
"""Weight of a token that did not choose the expert; those that did average 1."""
_LEAST_SHARE = 8
"""An expert needs a token for every so many elements of its inputs."""


@dataclass(frozen=True)
class Tally:
    """Counts of experts: in all; calibrated on other tokens, too; rounded to nearest."""

    experts: int = 0
    filled: int = 0
    nearest: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.experts + other.experts, self.filled + other.filled, self.nearest + other.nearest)

    def record(self) -> list[int]:
        """The counts as a list; `of` reads it."""
        return [self.experts, self.filled, self.nearest]

    @classmethod
    def of(cls, record: list[int]) -> Tally:
        return cls(*record)

    def notes(self) -> tuple[str, ...]:
        said = []
        if self.filled:
            said.append(
                f"{self.filled} of {self.experts} experts saw fewer tokens than their inputs have elements: other "
                "tokens, which count less, filled them up; a longer text would tell more of them"
            )
        if self.nearest:
            said.append(
                f"{self.nearest} of {self.experts} experts saw less than a token for {_LEAST_SHARE} elements of their "
                "inputs: they are rounded to nearest; give a longer text to calibrate them"
            )
        return tuple(said)


def round_experts(
    rounder: Rounder,
    runner: LayerRunner,
    config: Experts,
    linears: Mapping[str, Linear],
    layer: RoundedLayer,
    routed: Routed,
) -> Tally:
    """Rounds the experts' matrices into `layer`. Calibration uses only the float layer's activations."""
    found: dict[str, list[Quantized]] = {kind: [] for kind in (GATE_UP, DOWN) if linears[kind].format is not None}
    tally, columns = Tally(), max(linears[GATE_UP].k, linears[DOWN].k)
    for expert in range(config.count):
        one = _Expert(expert, config, layer.values, routed, runner)
        nearest = one.seen * _LEAST_SHARE < columns
        tally += Tally(1, int(one.seen < columns and not nearest), int(nearest))
        if nearest:
            for kind, pieces in found.items():
                pieces.append(rounder.nearest(one.weight(kind), _format(linears[kind])))
            continue
        moments = {DOWN: one.of_down()} if DOWN in found else {}
        # Computed before gate and up are rounded, and before AWQ scales up.
        if GATE_UP in found:
            moments[GATE_UP] = one.of_gate_up()
        if rounder.scales and len(found) == 2 and one.is_linear_in_up:
            one.scale(rounder, linears[DOWN], moments[DOWN])
        for kind, pieces in found.items():
            pieces.append(rounder.quantized(one.weight(kind), _format(linears[kind]), moments.pop(kind)))
    for kind, pieces in found.items():
        layer.put(kind, pieces)
    return tally


def _format(linear: Linear) -> WeightFormat:
    assert linear.format is not None
    return linear.format


def scale_inputs(
    rounder: Rounder,
    runner: LayerRunner,
    config: Experts,
    linears: Mapping[str, Linear],
    values: Values,
    moments: Mapping[str, Moments],
    routed: Routed,
) -> set[str]:
    """Scales columns of the gates and ups of all experts up, and their inputs down.

    The factors are powers of two, so that the router, which reads these inputs too, keeps its bits. Returns the changed
    norm and unquantized matrices.

    Call before anything is rounded. moments: of the shared expert's inputs, if it is quantized.
    """
    format = linears[GATE_UP].format
    if not rounder.scales or format is None or _NORM not in values:
        return set()
    inputs = routed.inputs
    magnitude = sum(np.abs(inputs[at : at + _ROWS]).sum(0) for at in range(0, len(inputs), _ROWS)) / np.float32(
        len(inputs)
    )
    candidates = [powers_of_two(channel_scales(magnitude, alpha)) for alpha in ALPHAS]
    errors = np.zeros(len(candidates))
    for expert in range(config.count):
        one = _Expert(expert, config, values, routed, runner)
        if one.seen:
            errors += one.share * rounder.errors(one.weight(GATE_UP), candidates, format, one.of_gate_up())
    if _SHARED in moments:
        shared = linears[_SHARED].format
        assert shared is not None
        errors += rounder.errors(values[f"{_SHARED}.weight"], candidates, shared, moments[_SHARED])
    scales = candidates[int(np.argmin(errors))]
    values[_NORM] /= scales
    inputs /= scales
    changed = {_NORM}
    for kind in _READERS:
        name = f"{kind}.weight"
        if name not in values:
            continue
        values[name] *= scales
        if kind in moments:
            moments[kind].scale_down(scales)
        if kind not in linears or linears[kind].format is None:
            changed.add(name)
    return changed


class _Expert:
    """One expert, with its calibration tokens."""

    def __init__(self, index: int, config: Experts, values: Values, routed: Routed, runner: LayerRunner) -> None:
        self._index, self._config, self._values = index, config, values
        self._routed, self._runner = routed, runner
        ids, weights = np.split(routed.chosen, 2, axis=1)
        chosen = ids == index
        self._tokens = np.flatnonzero(chosen.any(1))
        self._weights = np.square((weights.view(np.float32) * chosen).sum(1)[self._tokens])

    @property
    def seen(self) -> int:
        """The number of tokens that chose it."""
        return len(self._tokens)

    @property
    def share(self) -> float:
        """The mean weight of its errors over all tokens."""
        return float(self._weights.sum()) / len(self._routed.inputs)

    @property
    def is_linear_in_up(self) -> bool:
        """Whether its result is proportional to the output of up."""
        return not self._config.gate_limit and not self._config.biases

    def _rows(self, kind: str) -> slice:
        rows = len(self._values[f"{kind}.weight"]) // self._config.count
        return slice(self._index * rows, (self._index + 1) * rows)

    def weight(self, kind: str) -> Floats:
        """A view of the weight `kind`."""
        return self._values[f"{kind}.weight"][self._rows(kind)]

    def _taken(self, least: int) -> tuple[NDArray[np.int64], Floats]:
        """(tokens, their weights): at least `least` tokens; if need be, others at equal distances are added."""
        mean = self._weights.mean() if self.seen else np.float32(1)
        weights = self._weights / mean if mean else np.ones(self.seen, np.float32)
        if self.seen >= least:
            return self._tokens, weights.astype(np.float32)
        others = np.setdiff1d(np.arange(len(self._routed.inputs)), self._tokens, assume_unique=True)
        count = min(least - self.seen, len(others))
        filled = others[np.arange(count) * len(others) // max(1, count)]
        tokens = np.concatenate((self._tokens, filled))
        return tokens, np.concatenate((weights, np.full(count, _OF_OTHERS))).astype(np.float32)

    def of_gate_up(self) -> Moments:
        tokens, weights = self._taken(self._routed.inputs.shape[1])
        return self._runner.moments_of(self._routed.inputs[tokens], weights)

    def of_down(self) -> Moments:
        tokens, weights = self._taken(self.weight(DOWN).shape[1])
        bias = self._values.get(f"{GATE_UP}.bias")
        inner = expert_inner(
            torch.from_numpy(self._routed.inputs[tokens]),
            torch.from_numpy(self.weight(GATE_UP)),
            None if bias is None else torch.from_numpy(bias[self._rows(GATE_UP)]),
            self._config.gate_limit,
            self._config.gate_gain,
        )
        return self._runner.moments_of(inner.numpy(), weights)

    def scale(self, rounder: Rounder, down: Linear, moments: Moments) -> None:
        """Scales columns of down up, and rows of up down by the same factors."""
        assert down.format is not None
        assert moments.gram is not None
        scales = rounder.searched(self.weight(DOWN), down.format, moments, moments.mean)
        self.weight(DOWN)[...] *= scales
        self.weight(GATE_UP)[self._config.intermediate_size :] /= scales[:, None]
        moments.scale_down(scales)
