"""Packing reads a piece of a weight at a time and gives back what it read."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.store import weights
from llmc.compiler.store.conversions import conversions
from llmc.compiler.store.reads import Reads
from llmc.compiler.store.weights import plan_weights, write_weights
from llmc.compiler.targets.cpu import weights as cpu_weights
from llmc.compiler.targets.cpu.backend import named
from llmc.compiler.weight_request import WeightRequest
from llmc.models.convert import Array
from llmc.models.loader import Parameter
from llmc.models.sources.base import Tensor
from llmc.models.sources.folder_checkpoint import FolderCheckpoint

from support.tiny_models import make_tiny_model

ROWS, COLUMNS, COUNT = 256, 512, 12
PIECE_BYTES, MOST = 1 << 16, 1 << 17


class Held:
    """A checkpoint that knows how many of its elements were read and not given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.largest = self.total = self.releases = 0

    def read(self, elements: int) -> None:
        with self._lock:
            self.now += elements
            self.total += elements
            self.most, self.largest = max(self.most, self.now), max(self.largest, elements)

    def release(self) -> None:
        with self._lock:
            self.now, self.releases = 0, self.releases + 1


class Watched(Tensor):
    def __init__(self, held: Held) -> None:
        self._held = held

    @property
    def shape(self) -> tuple[int, ...]:
        return ROWS, COLUMNS

    def read(self, first: int, out: Array) -> None:
        self._held.read(out.size)
        out[...] = np.arange(first, first + len(out))[:, None]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_is_held_than_a_few_pieces(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weights, cpu_weights):
        monkeypatch.setattr(module, "_PIECE_BYTES", PIECE_BYTES)
    held, target = Held(), named("x86-64-v3")
    parameters = [Parameter(f"w{i}", "bf16", (Watched(held),)) for i in range(COUNT)]
    requests = [WeightRequest(p.name, p.shape, "bf16", packed=i % 2 == 0) for i, p in enumerate(parameters)]
    reads = Reads(held.release, MOST)
    layout = plan_weights(requests, target)
    write_weights(layout, parameters, target, tmp_path / "w", lambda done, total: None, threads, reads)
    assert held.total == COUNT * ROWS * COLUMNS
    assert held.largest <= PIECE_BYTES // 2
    # A thread has read a piece before it tells of it.
    assert held.most <= MOST + threads * held.largest
    assert held.releases >= held.total // (2 * MOST)

    packed, held.most = held.releases, 0
    conversions(requests, parameters, {p.name: "f32" for p in parameters}, threads, reads)
    assert held.releases > packed
    # Each row is read as it is, then as it is stored.
    assert held.most <= 2 * (MOST + threads * held.largest)


def test_what_was_given_back_is_read_again(tmp_path: Path) -> None:
    checkpoint = FolderCheckpoint(make_tiny_model(tmp_path, "llama", num_hidden_layers=1, max_shard_size="100KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    before = {name: tensor.array.copy() for name, tensor in tensors.items()}
    checkpoint.release()
    assert all(np.array_equal(tensors[name].array, before[name]) for name in tensors)
