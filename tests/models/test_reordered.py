"""Parameters with their rows or columns in another order, as values and as stored numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.targets.quantized_rows import quantized_rows
from llmc.models.loader import Parameter, load_parameters
from llmc.models.sources import reordered
from llmc.models.sources.registry import open_source
from llmc.quantize.formats.base import Quantized
from llmc.quantize.rtn import quantize

from support.quantized_checkpoints import in_act_order, make_gptq_model

NAME = "layers.0.mlp.gate_up.weight"


@pytest.fixture(scope="module")
def parameter(tmp_path_factory: pytest.TempPathFactory) -> Parameter:
    return of_model(make_gptq_model(tmp_path_factory.mktemp("reordered") / "model", change=in_act_order))


def of_model(model: Path) -> Parameter:
    source = open_source(model)
    return next(p for p in load_parameters(source.config(), source.checkpoint(), "f32") if p.name == NAME)


def packed(parameter: Parameter) -> Quantized:
    """As packers read it: a few rows at a time."""
    assert parameter.stored is not None
    n, k = parameter.shape
    out, read = Quantized.empty(parameter.stored.format, n, k), quantized_rows(parameter, parameter.stored.format)
    for first in range(0, n, 48):
        read(first, out.rows(slice(first, first + 48)))
    return out


def test_columns_and_rows(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reordered, "_ROWS", 29)
    value, (n, _) = parameter.value(), parameter.shape
    assert parameter.stored is not None
    columns = parameter.stored.columns
    assert columns is not None
    ordered = parameter.in_stored_order()
    assert ordered.stored is not None
    assert ordered.stored.columns is None
    assert ordered.columns is columns
    assert np.array_equal(ordered.value(), value[:, columns])
    assert np.array_equal(packed(ordered).value(), value[:, columns])
    rows = np.random.default_rng(0).permutation(n).astype(np.int32)
    both = ordered.with_rows(rows)
    assert both.shape == parameter.shape
    assert np.array_equal(both.value(), value[:, columns][rows])
    assert np.array_equal(packed(both).value(), value[:, columns][rows])


def test_numbers_in_another_order_are_not_taken_for_the_weight(parameter: Parameter) -> None:
    found = packed(parameter)
    assert np.array_equal(found.value(), quantize(parameter.value(), found.format).value())


def test_a_bias(parameter: Parameter) -> None:
    bias = Parameter.of("bias", "f32", np.arange(4, dtype=np.float32), np.arange(4, 6, dtype=np.float32))
    assert bias.in_stored_order() is bias
    rows = np.array([5, 0, 3, 1, 2, 4], np.int32)
    assert bias.with_rows(rows).value().tolist() == rows.tolist()
