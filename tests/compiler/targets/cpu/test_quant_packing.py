"""Quantized weights as they are written, against the plain definition of their layout."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from llmc.compiler.config import CompileError
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.targets.cpu import weights as cpu_weights
from llmc.compiler.targets.cpu.backend import named
from llmc.compiler.targets.cpu.quant_packing import unpack_quantized
from llmc.compiler.weight_request import WeightRequest
from llmc.models.convert import DTYPES
from llmc.models.loader import Parameter
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.steps import Steps
from llmc.quantize.rtn import quantize

TARGET = named("x86-64-v3")
COLUMNS = TARGET.cpu.panel_columns
FORMATS: list[WeightFormat] = [
    Integers(8),
    Integers(4, 32),
    Integers(4, 32, True),
    Integers(4, -1, True),
    Integers(5, 32),
    Integers(6, 32),
]
STEPPED = [Steps(size, asymmetric) for size in (32, -1) for asymmetric in (False, True)]
SHAPES = [(64, 64), (50, 33), (1, 1), (17, 100)]


def packed_by_definition(value: Quantized) -> dict[str, np.ndarray]:
    """One element at a time."""
    n, k = value.numbers.shape
    panels, lines, bits = -(-n // COLUMNS), -(-k // 8), value.format.bits
    words = {5: -(-lines // 4) * 5, 6: -(-lines // 2) * 3}.get(bits, lines * bits // 4)
    numbers = np.zeros((panels, words, COLUMNS, 4), np.uint8)
    halves = numbers.view("<u2")
    scale = np.zeros((panels, value.scale.shape[1], COLUMNS), np.float32)
    of_group = np.zeros((panels, value.format.groups(k), COLUMNS), np.uint8)
    (beside,) = [name for name in value.planes if name != "scale"] or [""]
    for row in range(n):
        panel, column = divmod(row, COLUMNS)
        for element in range(k):
            number = int(value.numbers[row, element])
            if bits == 8:
                numbers[panel, element // 4, column, element % 4] = number
            elif bits == 5:
                quad, line = divmod(element // 8, 4)
                place, half = element % 2 + element % 8 // 4 * 2, element % 4 // 2
                of_half = halves[panel, :, column, half]
                of_half[5 * quad + line] |= number << 5 * place if place < 3 else number >> 4 << 15
                of_half[5 * quad + 4] |= (number & 15) << 4 * line if place == 3 else 0
            elif bits == 6:
                pair, line = divmod(element // 8, 2)
                second, odd, half = element % 8 // 4, element % 2, element % 4 // 2
                own, shared = halves[panel, 3 * pair + line, column], halves[panel, 3 * pair + 2, column]
                if not second:
                    own[half] |= number << 6 * odd
                elif odd:
                    own[half] |= number >> 2 << 12
                    shared[half] |= (number & 3) << 8 * line + 6
                else:
                    shared[half] |= number << 8 * line
            else:
                high = element % 8 // 4
                numbers[panel, element // 8, column, element % 4] |= number << 4 * high
        scale[panel, :, column] = value.scale[row]
        if beside:
            of_group[panel, :, column] = value.planes[beside][row]
    found = {"": numbers, ".scale": scale}
    return {**found, f".{beside}": of_group} if beside else found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_every_number_is_where_it_should_be(
    threads: int, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_weights, "_PIECE_BYTES", piece_bytes)
    rng = np.random.default_rng(0)
    parameters, requests, formats = [], [], {}
    for i, format in enumerate([*FORMATS, *STEPPED]):
        for j, shape in enumerate(SHAPES):
            name = f"weight{i}{j}"
            source = DTYPES[("f32", "bf16", "f16")[j % 3]]
            parameters.append(Parameter.of(name, "bf16", rng.standard_normal(shape).astype(source)))
            requests.append(WeightRequest(name, shape, "u8", True, format))
            formats[name] = format
    layout = plan_weights(requests, TARGET)
    path = tmp_path / "w.safetensors"
    checksums = write_weights(layout, parameters, TARGET, path, lambda done, total: None, threads)
    data = path.read_bytes()
    assert len(data) == layout.total_bytes
    assert checksums == {w.name: zlib.crc32(data[w.file_offset :][: w.nbytes]) for w in layout.weights}
    with safe_open(path, "np") as file:
        for parameter in parameters:
            format, value = formats[parameter.name], np.empty(parameter.shape, np.float32)
            parameter.read(0, value)
            expected = packed_by_definition(quantize(value, format))
            found = {suffix: file.get_tensor(parameter.name + suffix) for suffix in expected}
            for suffix, array in expected.items():
                assert np.array_equal(found[suffix], array), parameter.name + suffix
            arrays = {suffix.removeprefix(".") or "numbers": array for suffix, array in found.items()}
            assert np.array_equal(
                unpack_quantized(arrays, value.shape[0], value.shape[1], format).value(),
                quantize(value, format).value(),
            )


@pytest.mark.parametrize("format", STEPPED, ids=str)
def test_steps_and_zero_points_make_int8(format: Steps) -> None:
    """Of groups of all kinds: far apart in size, of one sign, of zeros, of one value that matters."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((64, 160)).astype(np.float32) * np.exp(3 * rng.standard_normal((64, 160)))
    weight[8:16] = np.abs(weight[8:16])
    weight[16:24] = -np.abs(weight[16:24])
    weight[24:28] = 0
    weight[28:32, 32:] = 0
    weight[32:36] *= np.float32(1e-30)
    found = quantize(weight, format)
    of_group = found.planes["step"]
    assert found.scale.shape == (64, 1)
    group = np.arange(160) // (160 if format.group_size < 0 else format.group_size)
    step, zero = (of_group & 15)[:, group].astype(int), (of_group >> 4)[:, group].astype(int)
    stepped = (found.numbers - zero) * step
    assert stepped.min() >= -128
    assert stepped.max() <= 127
    assert step.min() >= 1
    assert np.array_equal(found.value(), stepped * found.scale.astype(np.float64))
    assert (found.value()[24:28] == 0).all()
    # Numbers end where the step does not divide the range: at most half a step of the row past it.
    row = np.abs(weight).max(1, keepdims=True)
    reach = 0.5 * step * found.scale + (8 if not format.asymmetric else 16) * found.scale
    assert (np.abs(found.value() - weight) <= reach + 1e-6 * row).all()


def test_parts_of_a_parameter_are_rounded_together(tmp_path: Path) -> None:
    """A fused projection has several tensors one below the other; panels go across them."""
    rng = np.random.default_rng(1)
    parts = tuple(rng.standard_normal((rows, 40)).astype(np.float32) for rows in (20, 7, 9))
    format = Integers(4, 32)
    layout = plan_weights([WeightRequest("w", (36, 40), "u8", True, format)], TARGET)
    write_weights(layout, [Parameter.of("w", "f32", *parts)], TARGET, tmp_path / "w", lambda done, total: None)
    expected = packed_by_definition(quantize(np.concatenate(parts), format))
    with safe_open(tmp_path / "w", "np") as file:
        for suffix, array in expected.items():
            assert np.array_equal(file.get_tensor("w" + suffix), array)


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    value = np.ones((40, 40), np.float32)
    value[33, 5] = np.inf
    layout = plan_weights([WeightRequest("w", value.shape, "u8", True, Integers(8))], TARGET)
    with pytest.raises(CompileError, match="cannot quantize w: a weight is infinite or not a number"):
        write_weights(layout, [Parameter.of("w", "f32", value)], TARGET, tmp_path / "w", lambda done, total: None)
