"""What a matrix loses, against float64: narrowed, rounded to a format, kept."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.config import CompileConfig
from llmc.compiler.notes import notes
from llmc.compiler.resolve import resolve
from llmc.compiler.store.conversions import conversions
from llmc.compiler.weight_request import WeightRequest
from llmc.models import open_source
from llmc.models.convert import Array
from llmc.models.loader import Parameter
from llmc.models.sources.base import Tensor
from llmc.models.sources.stored import Stored
from llmc.quantize import WeightFormat
from llmc.quantize.conversion import Conversion, conversion_of, error_of, error_text
from llmc.quantize.formats.base import Quantized
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.integers import Integers
from llmc.quantize.rtn import quantize

from support.tiny_models import make_tiny_model

SHAPE = (300, 520)


def random(dtype: type = np.float32) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(SHAPE).astype(dtype)


def request(dtype: str, format: WeightFormat | None = None) -> WeightRequest:
    return WeightRequest("w", SHAPE, dtype, packed=True, format=format)


def lost(wanted: WeightRequest, parameter: Parameter, types: str) -> Conversion | None:
    found = {threads: conversions([wanted, wanted], [parameter], {"w": types}, threads) for threads in (1, 3)}
    assert found[1] == found[3]
    return found[1].get("w")


def check(found: Conversion | None, value: Array, stored: Array) -> None:
    assert found is not None
    wide, difference = value.astype(np.float64), stored.astype(np.float64) - value
    assert found.error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(wide), rel=1e-3)
    assert found.most == pytest.approx(np.abs(difference).max() / np.abs(wide).max(), rel=1e-3)
    assert found.norm == pytest.approx(np.linalg.norm(wide), rel=1e-3)


@pytest.mark.parametrize(("dtype", "types"), [(np.float32, "f32"), (np.float16, "f16")])
def test_narrowing(dtype: type, types: str) -> None:
    value = random(dtype)
    parameter = Parameter.of("w", "bf16", value)
    wide = value.astype(np.float32)
    check(lost(request("bf16"), parameter, types), wide, wide.astype(ml_dtypes.bfloat16))
    assert lost(request("f32"), parameter, types) is None


def test_what_happens_to_fit_is_exact() -> None:
    narrow = random().astype(ml_dtypes.bfloat16)
    assert lost(request("bf16"), Parameter.of("w", "bf16", narrow), "bf16") is None
    assert lost(request("bf16"), Parameter.of("w", "bf16", narrow.astype(np.float32)), "f32") is None
    assert lost(request("bf16"), Parameter.of("w", "bf16", np.zeros(SHAPE, np.float32)), "f32") is None


def test_what_is_no_number_is_left_out() -> None:
    value = random()
    value[3, 4], value[5, 6], value[7, 8] = np.inf, np.nan, np.finfo(np.float32).max
    found = lost(request("bf16"), Parameter.of("w", "bf16", value), "f32")
    assert found is not None
    assert 0 < found.error < 1
    others = np.delete(value, [3 * value.shape[1] + 4, 5 * value.shape[1] + 6, 7 * value.shape[1] + 8])
    assert found.norm == pytest.approx(float(np.linalg.norm(others)), rel=1e-3)
    assert found.overflows == 1
    assert conversion_of(found.record()) == found
    narrow = np.zeros(SHAPE, np.float32)
    narrow[0, 0] = 1e6
    alone = lost(request("f16"), Parameter.of("w", "f16", narrow), "f32")
    assert alone is not None
    assert (alone.error, alone.overflows) == (0.0, 1)


@pytest.mark.parametrize("format", [Integers(4, 64, asymmetric=True), Codes("nf4", 64)], ids=str)
def test_rounding(format: WeightFormat) -> None:
    value = random()
    check(lost(request("u8", format), Parameter.of("w", "bf16", value), "f32"), value, quantize(value, format).value())


def test_rounding_is_measured_on_rows_evenly_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.store.conversions._BLOCK", 520 * 3)
    monkeypatch.setattr("llmc.compiler.store.conversions._MOST_ROUNDED", 520 * 30)
    value, rows = random(), np.concatenate([np.arange(first, first + 3) for first in range(0, 300, 30)])
    format = Integers(4, 64)
    found = lost(request("u8", format), Parameter.of("w", "bf16", value), "f32")
    check(found, value[rows], quantize(value[rows], format).value())


class Kept(Stored):
    def __init__(self, numbers: Quantized) -> None:
        self._numbers, self.format = numbers, numbers.format

    def read(self, first: int, out: Quantized) -> None:
        self._numbers.rows(slice(first, first + len(out.numbers))).copy_to(out)


class Numbers(Tensor):
    def __init__(self, numbers: Quantized) -> None:
        self._numbers = numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return self._numbers.numbers.shape

    @property
    def stored(self) -> Stored:
        return Kept(self._numbers)

    def read(self, first: int, out: Array) -> None:
        out[...] = self._numbers.rows(slice(first, first + len(out))).value()


def test_numbers_that_are_kept_are_exact_and_others_are_not() -> None:
    numbers = quantize(random(), Integers(4, 32))
    parameter = Parameter("w", "bf16", (Numbers(numbers),))
    assert lost(request("u8", Integers(4, 32)), parameter, "gptq") is None
    value = numbers.value().astype(np.float32)
    check(lost(request("u8", Integers(4, 64)), parameter, "gptq"), value, quantize(value, Integers(4, 64)).value())
    check(lost(request("bf16"), parameter, "gptq"), value, value.astype(ml_dtypes.bfloat16))


def test_matrices_together() -> None:
    one, other = Conversion("f32", 0.1, 0.2, 3.0), Conversion("f32", 0.4, 0.2, 4.0)
    assert error_of([one, other]) == pytest.approx(np.hypot(0.3, 1.6) / 5)
    assert error_of([]) == 0
    assert conversion_of(one.record()) == one


def test_how_an_error_is_written() -> None:
    texts = {0.0: "exact", 0.00166: "0.17 %", 0.0813: "8.1 %", 0.234: "23 %", 1.5: "150 %", 4.2e-7: "0.000042 %"}
    assert {error: error_text(error) for error in texts} == texts


def test_numbers_that_become_infinite_are_counted_in_a_note(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=2)
    resolved = resolve(CompileConfig(model, tmp_path / "artifact", dtype="f16", target="x86-64-v3"))
    found = {f"layers.{i}.mlp.down.weight": Conversion("f32", 0.0, 0.0, 1.0, 1000 + i).record() for i in range(2)}
    assert notes(resolved, open_source(model).checkpoint(), found) == (
        "mlp.down (F32): rounded to f16, relative error exact; too large for it, and infinite now: 2,001; a wider "
        "--dtype holds them",
    )
