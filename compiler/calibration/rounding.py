"""Rounds the linear layers of a decoder layer with one of the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.calibration.plan import BEFORE, Linear
from llmc.compiler.calibration.request import CalibrationConfig
from llmc.compiler.calibration.running import Floats, Moments, Values
from llmc.compiler.calibration.threads import Workers
from llmc.models.config import ModelConfig
from llmc.quantize.export.base import Layout
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.methods import awq, gptq
from llmc.quantize.methods.grid import rounded_scale
from llmc.quantize.methods.grids import ONE, find_grid, round_to_nearest
from llmc.quantize.methods.smoothquant import smooth_scales

_ROWS = 512  # rows rounded at a time
Vectors = Mapping[str, str]
"""Stored dtypes of norms and biases, by name in the layer: f32, f16 or bf16."""


@dataclass
class RoundedLayer:
    """matrices: by kind. changed: norms and biases that absorbed scales. values: current values of all parameters."""

    values: Values
    matrices: dict[str, Quantized] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def put(self, kind: str, pieces: list[Quantized]) -> None:
        """Adds a rounded matrix, given in pieces of rows, and its values."""
        self.matrices[kind] = _joined(pieces)
        write_values(self.matrices[kind], self.values[f"{kind}.weight"])


class Rounder:
    def __init__(self, config: CalibrationConfig, model: ModelConfig, layout: Layout, workers: Workers) -> None:
        self._config, self._model, self._workers = config, model, workers
        self._dtype = layout.scale_dtype

    @property
    def wants_moments(self) -> bool:
        """Whether the method uses inputs at all."""
        return self._config.method != "rtn"

    @property
    def wants_grams(self) -> bool:
        return self._config.method in ("gptq", "awq")

    @property
    def scales(self) -> bool:
        """Whether columns are scaled according to their inputs."""
        return self._config.method in ("awq", "smoothquant")

    def round(
        self, linears: Mapping[str, Linear], values: Values, moments: dict[str, Moments], vectors: Vectors
    ) -> RoundedLayer:
        """Rounds the quantized kinds of a layer. Overwrites `values`.

        moments: of those kinds, consumed; unused by rtn, which also rounds experts like other matrices.
        """
        layer = RoundedLayer(values)
        apart = self.wants_moments
        wanted = [one for one in linears.values() if one.format is not None and not (apart and one.of_experts)]
        if self.scales:
            for linear in wanted:
                self._scale(linear, linears, layer, moments[linear.kind], vectors)
        for linear in wanted:
            assert linear.format is not None
            name = f"{linear.kind}.weight"
            layer.put(linear.kind, [self.quantized(values[name], linear.format, moments.pop(linear.kind, None))])
        return layer

    def quantized(self, weight: Floats, format: WeightFormat, moments: Moments | None) -> Quantized:
        """Rounds one matrix; GPTQ consumes its moments."""
        if self._config.method != "gptq":
            return self._rounded(weight, format, moments, None)
        return self._rounded(weight, format, None, self._factor(moments))

    def nearest(self, weight: Floats, format: WeightFormat) -> Quantized:
        """Rounds one matrix to nearest, whatever the method."""
        return self._rounded(weight, format, None, None)

    def each(self, weight: Floats, formats: Sequence[WeightFormat], moments: Moments | None) -> Iterator[Quantized]:
        """Rounds the same matrix to several formats, analysing its inputs once."""
        factor = self._factor(moments) if self._config.method == "gptq" else None
        for format in formats:
            yield self._rounded(weight, format, moments, factor)

    def _factor(self, moments: Moments | None) -> gptq.Factor:
        assert moments is not None
        assert moments.gram is not None
        found = gptq.factor(moments.gram.numpy(), self._config.damping)
        moments.gram = None
        return found

    def _rounded(
        self, weight: Floats, format: WeightFormat, moments: Moments | None, factor: gptq.Factor | None
    ) -> Quantized:
        method, dtype = self._config.method, self._dtype
        work: Callable[[Floats], Quantized]
        if factor is not None:
            work = lambda rows: gptq.quantize_rows(rows, factor, format, dtype=dtype)  # noqa: E731
        elif method == "awq" and moments is not None:
            assert moments.gram is not None
            gram = moments.gram.numpy()
            work = lambda rows: awq.quantize_rows(rows, gram, format, dtype=dtype)  # noqa: E731
        else:
            work = lambda rows: round_to_nearest(rows, format, find_grid(rows, format, dtype=dtype, shrinks=ONE))  # noqa: E731
        return _joined(self._workers.map(work, [weight[at : at + _ROWS] for at in range(0, len(weight), _ROWS)]))

    def _scale(
        self, linear: Linear, linears: Mapping[str, Linear], layer: RoundedLayer, moments: Moments, vectors: Vectors
    ) -> None:
        """Scales columns of the weight up, and the producer of its inputs down by the same factors."""
        before = BEFORE.get(linear.kind, "")
        if before in linears and linears[before].format is None:
            return  # its weight would only be rounded to its stored dtype
        if f"{before}.weight" not in layer.values:
            return  # its inputs have another reader
        weight = layer.values[f"{linear.kind}.weight"]
        shares = self._model.num_heads // self._model.num_kv_heads if linear.kind == "attention.out" else 1
        assert linear.format is not None
        if self._config.method == "awq":
            scales = self.searched(weight, linear.format, moments, self._shared(moments.mean, shares, np.mean))
        else:
            inputs = self._shared(moments.largest, shares, np.max)
            scales = smooth_scales(inputs, self._shared(np.abs(weight).max(0), shares, np.max))
        scales = self._fold(before, scales, shares, layer, vectors)
        weight *= scales
        moments.scale_down(scales)

    def searched(self, weight: Floats, format: WeightFormat, moments: Moments, magnitudes: Floats) -> Floats:
        """AWQ's factors for the columns. magnitudes: of the inputs."""
        assert moments.gram is not None
        largest = moments.largest if self._config.act_bits == 8 else None
        return awq.search_scales(
            weight,
            moments.gram.numpy(),
            magnitudes,
            format,
            dtype=self._dtype,
            largest=largest,
            each=self._workers.map,
        )

    def errors(
        self, weight: Floats, candidates: Sequence[Floats], format: WeightFormat, moments: Moments
    ) -> NDArray[np.float64]:
        """AWQ's output error of a matrix whose columns are scaled by each of the candidates."""
        assert moments.gram is not None
        largest = moments.largest if self._config.act_bits == 8 else None
        gram, each = moments.gram.numpy(), self._workers.map
        return np.array(
            awq.errors_of(weight, gram, candidates, format, dtype=self._dtype, largest=largest, each=each), np.float64
        )

    def _shared(self, channels: Floats, shares: int, how: Callable[..., Floats]) -> Floats:
        """Makes scales equal for input channels that are copies of one producer channel, `shares` heads apart."""
        heads = channels.reshape(-1, shares, self._model.head_dim) if shares > 1 else channels.reshape(-1, 1, 1)
        return np.broadcast_to(how(heads, axis=1, keepdims=True), heads.shape).reshape(-1).astype(np.float32)

    def _fold(self, before: str, scales: Floats, shares: int, layer: RoundedLayer, vectors: Vectors) -> Floats:
        """Divides the producer's rows by the scales; returns the factors effectively applied after storage rounding."""
        values = layer.values
        own = scales
        if shares > 1:
            own = np.ascontiguousarray(scales.reshape(-1, shares, self._model.head_dim)[:, 0]).reshape(-1)
        matrix, vector = f"{before}.weight", f"{before}.bias"
        if values[matrix].ndim == 1:
            matrix, vector = "", f"{before}.weight"
        if vector in values:
            rows = slice(len(values[vector]) - len(own), None)
            old = values[vector][rows]
            new = rounded_scale(old / own, vectors[vector])
            # Vectors are rounded when stored, so the actual scale is the ratio after rounding.
            kept = (old != 0) & (new != 0)
            own = np.divide(old, new, out=own.copy(), where=kept)
            values[vector][rows] = new
            layer.changed.add(vector)
        if matrix:
            rows = slice(len(values[matrix]) - len(own), None)
            values[matrix][rows] /= own[:, None]
        if shares > 1:
            heads = own.reshape(-1, 1, self._model.head_dim)
            return np.repeat(heads, shares, axis=1).reshape(-1)
        return own


def write_values(quantized: Quantized, out: Floats) -> None:
    """Writes the values of the numbers to `out`, in runs of rows."""
    for first in range(0, len(out), _ROWS):
        rows = slice(first, first + _ROWS)
        out[rows] = quantized.rows(rows).value()


def _joined(pieces: list[Quantized]) -> Quantized:
    numbers = np.concatenate([piece.numbers for piece in pieces])
    planes = {name: np.concatenate([piece.planes[name] for piece in pieces]) for name in pieces[0].planes}
    return Quantized(pieces[0].format, numbers, planes)
