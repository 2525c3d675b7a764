"""Judges a weight format that is new to llmc: its rounding, its kernels called directly, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, unpack_quantized
from llmc.compiler.targets.cpu.target import Target, native_target
from llmc.quantize import QuantConfig, WeightFormat
from llmc.quantize.formats.base import Quantized
from llmc.quantize.formats.registry import format_of
from llmc.quantize.rtn import quantize

from support.compiled import compile_tiny
from support.fixed_point import multiplied
from support.kernel_harness import run, targets_here
from support.new_family import targets_here as target_names
from support.quantized_model import LADDER, assert_company_changes_no_bit, logits_error, make_model

_ROWS = 19
_SHAPES = ((50, 172), (115, 1100), (7, 1))
_ERROR = 1e-5  # of float32 sums, of the largest logit


def check_rounding(format: WeightFormat) -> None:
    """A record is read back, zeros stay, and beside what a group has, no other number is nearer to a value."""
    assert format_of(format.record()) == format
    weight = np.random.default_rng(0).standard_normal((5, 77)).astype(np.float32)
    weight[2], weight[3, :40] = 0, np.abs(weight[3, :40])
    found = quantize(weight, format)
    values = [
        Quantized(format, np.full_like(found.numbers, number), found.planes).value()
        for number in range(1 << format.bits)
    ]
    least = np.nanmin(np.abs(np.array(values) - weight), 0)  # some codes of floats are no number
    assert (np.abs(found.value() - weight) <= least + 1e-6 * np.abs(weight).max()).all()
    assert np.abs(found.value()[2]).max() <= 1e-30
    assert format.bits_per_weight(77) == 8 * sum(a.nbytes for a in found.planes.values()) / 5 / 77 + format.bits


def check_kernels(format: WeightFormat) -> None:
    """Kernels of this CPU's highest level and of the lowest give the sums of float64, the same bits for any rows and
    tasks, and a table's rows. Levels between share the code of one or the other."""
    for target in targets_here("x86-64-v3") or [native_target()]:
        for n, k in _SHAPES:
            rng = np.random.default_rng((n, k))
            weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, k), (_ROWS, k)))
            packed = pack_quantized(weight, target.panel_columns, format)
            value = unpack_quantized(packed, n, k, format).value()
            assert np.array_equal(value, quantize(weight, format).value())
            _check_table(format, target, packed, value)
            operands = {{"numbers": "w"}.get(name, name): array for name, array in packed.items()}
            for act, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
                read = x.astype(dtype)
                expected, first = multiplied(read, act, format, target) @ value.T, None
                for tile in (1, target.row_tile):
                    spec = linear_quant_spec(n, k, tile, act, format)
                    for rows, tasks in ((_ROWS, 1), (_ROWS, 3), (1, 2)):
                        arrays: dict[str, NDArray[Any]] = {"x": pack_activation(read, tile), **operands}
                        arrays["y"] = np.full((_ROWS, n), np.nan, np.float32)
                        y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
                        first = y if first is None else first
                        assert y[:rows].tobytes() == first[:rows].tobytes(), f"tile {tile}, {rows} rows, {tasks} tasks"
                assert first is not None
                assert np.abs(first - expected).max() <= 3e-7 * max(k, 16) ** 0.5 * np.abs(expected).max()


def _check_table(format: WeightFormat, target: Target, packed: dict[str, NDArray[Any]], value: NDArray[Any]) -> None:
    vocab, dim = value.shape
    columns = {"panel_columns": target.panel_columns}
    spec = KernelSpec.of("embedding", "embedding_quant", dim=dim, vocab=vocab, **columns, **format.kernel_params())
    ids = np.arange(vocab, dtype=np.int32)[::-1].copy()
    arrays = {"ids": ids, **{{"numbers": "weight"}.get(name, name): array for name, array in packed.items()}}
    arrays["out"] = np.full((vocab, dim), np.nan, np.float32)
    rows = run(spec, target, arrays, written=("out",), scalars={0: vocab})["out"]
    assert np.abs(rows - value[ids]).max() <= 2e-7 * np.abs(value).max()


def check_in_a_model(scheme: str, folder: Path) -> None:
    """A model of this scheme, compiled for every target here, has the logits of torch on the same values."""
    config, model = QuantConfig(scheme), make_model(folder / "model", "plain")
    for target in target_names():
        artifact = compile_tiny(
            model, folder / target, folder / "cache", buckets=LADDER, dtype="f32", quant=config, target=target
        )
        assert logits_error(model, config, artifact) <= _ERROR, target
        assert_company_changes_no_bit(artifact)
        artifact.close()
