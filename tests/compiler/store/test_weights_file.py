"""weights.safetensors as it is written, against the plain definition of its layout."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from llmc.compiler.config import CompileError
from llmc.compiler.store import weights
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.targets.cpu import weights as cpu_weights
from llmc.compiler.targets.cpu.backend import named
from llmc.compiler.weight_request import WeightRequest
from llmc.models.convert import DTYPES
from llmc.models.eager import as_tensor
from llmc.models.loader import Parameter
from llmc.models.sources.base import ArrayTensor

TARGET = named("x86-64-v3")
COLUMNS = TARGET.cpu.panel_columns


def parameter(name: str, dtype: str, source: str, *parts: tuple[int, ...]) -> Parameter:
    rng = np.random.default_rng(len(name))
    return Parameter.of(name, dtype, *(rng.normal(size=p).astype(DTYPES[source]) for p in parts))


def arrays_of(made: Parameter) -> list[ArrayTensor]:
    return [part for part in made.parts if isinstance(part, ArrayTensor)]


PARAMETERS = [
    parameter("square", "bf16", "bf16", (64, 32)),
    parameter("ragged", "bf16", "f32", (50, 33)),
    parameter("fused", "bf16", "f16", (40, 6), (3, 6), (7, 6)),
    parameter("half", "f16", "f16", (50, 33)),
    parameter("narrowed", "f16", "bf16", (5, 12), (9, 12)),
    parameter("wide", "f32", "f32", (33, 5)),
    parameter("rows", "bf16", "f32", (17, 9)),
    parameter("bias", "f32", "bf16", (4,), (9,)),
]
PACKED = {"square", "ragged", "fused", "half", "wide"}


def packed_by_definition(value: torch.Tensor) -> torch.Tensor:
    """[panel][word][column][lane], one element at a time."""
    lanes = 4 // value.element_size()
    n, k = value.shape
    out = torch.zeros((-(-n // COLUMNS), -(-k // lanes), COLUMNS, lanes), dtype=value.dtype)
    for row in range(n):
        for column in range(k):
            out[row // COLUMNS, column // lanes, row % COLUMNS, column % lanes] = value[row, column]
    return out


def written(path: Path, threads: int) -> dict[str, int]:
    requests = [WeightRequest(p.name, p.shape, p.dtype, p.name in PACKED) for p in PARAMETERS]
    layout = plan_weights(requests, TARGET)
    seen: list[tuple[int, int]] = []
    checksums = write_weights(
        layout, reversed(PARAMETERS), TARGET, path, lambda done, total: seen.append((done, total)), threads
    )
    assert path.stat().st_size == layout.total_bytes
    assert seen == [(i + 1, len(PARAMETERS)) for i in range(len(PARAMETERS))]
    data = path.read_bytes()
    assert checksums == {w.name: zlib.crc32(data[w.file_offset :][: w.nbytes]) for w in layout.weights}
    return checksums


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_every_weight_is_where_and_what_it_should_be(
    threads: int, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_weights, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    written(tmp_path / "w.safetensors", threads)
    torch_dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        for p in PARAMETERS:
            value = torch.cat([as_tensor(part.array) for part in arrays_of(p)]).to(torch_dtypes[p.dtype])
            expected = packed_by_definition(value) if p.name in PACKED else value
            assert torch.equal(file.get_tensor(p.name), expected), p.name


def test_threads_do_not_change_a_byte(tmp_path: Path) -> None:
    written(tmp_path / "one", 1)
    written(tmp_path / "four", 4)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "four").read_bytes()


def test_a_missing_or_misshapen_weight_is_named(tmp_path: Path) -> None:
    layout = plan_weights([WeightRequest("a", (4, 4), "f32", False)], TARGET)

    def write(*parameters: Parameter) -> None:
        write_weights(layout, parameters, TARGET, tmp_path / "w", lambda done, total: None)

    with pytest.raises(CompileError, match="no value for weights a"):
        write()
    value: NDArray[Any] = np.zeros((4, 5), np.float32)
    with pytest.raises(CompileError, match="weight a has 80 bytes where 64 were planned"):
        write(Parameter.of("a", "f32", value))


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "w", 2)
