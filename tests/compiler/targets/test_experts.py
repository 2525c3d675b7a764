"""The kernels of experts on every target of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.models.convert import DTYPES
from llmc.quantize.formats.registry import SCHEMES

from support.expert_layers import Compiled, Layer
from support.kernel_harness import targets_here as cpus_here
from support.marks import rare
from support.new_family import targets_here

pytestmark = pytest.mark.native
TARGETS = [name for name in targets_here() if name.startswith("reference")]
TARGETS += [cpu.name for cpu in cpus_here("x86-64-v3")]


def in_turn(*cases: Sequence[Any]) -> list[Any]:
    """Every case on every target; every time, each case on one of them or more, and on each target one or more."""
    turns = min(len(cases), len(TARGETS))
    return [
        (rare if (number - place) % turns else pytest.param)(target, *case)
        for number, case in enumerate(cases)
        for place, target in enumerate(TARGETS)
    ]


def check(layer: Layer, target: str, folder: Path, sizes: tuple[int, ...]) -> None:
    """Graphs of several sizes: the numbers expected, and a row's bits among any others and for any number of tasks."""
    rng, count = np.random.default_rng(5), len(layer.x)
    int8 = layer.scheme is not None and layer.scheme.act_bits == 8
    # Numbers of 16 bits and of 8 that lie between two may round either way.
    bound = (1e-2 if layer.act != "f32" or int8 else 2e-6) * np.abs(layer.expected).max()
    graphs = [Compiled(layer, target, tokens, folder / f"{tokens}.so") for tokens in sizes]
    whole = graphs[-1].run(np.arange(count), 1)
    assert np.abs(whole - layer.expected).max() <= bound
    for tokens, graph in zip(sizes, graphs, strict=True):
        for num_tasks in (1, 2, 7, 40):
            order = rng.permutation(count)[: rng.integers(1, tokens + 1)]
            assert graph.run(order, num_tasks).tobytes() == whole[order].tobytes(), (tokens, num_tasks)


@pytest.mark.parametrize(("target", "act"), in_turn(["f32"], ["bf16"]))
def test_of_a_token_nothing_depends_on_others(target: str, act: str, tmp_path: Path) -> None:
    check(
        Layer(45, 61, 35, act, biased=act == "f32", limited=act == "f32", gelu=act == "bf16"),
        target,
        tmp_path,
        (1, 3, 45),
    )


@pytest.mark.parametrize(
    ("target", "scheme", "act"),
    in_turn((None, "f32"), ("w8a8", "bf16"), ("w4a16", "bf16")),
)
def test_without_a_gate(target: str, scheme: str | None, act: str, tmp_path: Path) -> None:
    check(Layer(21, 72, 37, act, biased=act == "f32", scheme=scheme, gated=False), target, tmp_path, (2, 21))


@pytest.mark.parametrize(
    ("target", "scheme", "act"),
    in_turn(("w4a16", "f32"), ("w4a16", "bf16"), ("w8a8", "f32")),
)
def test_quantized_weights(target: str, scheme: str, act: str, tmp_path: Path) -> None:
    """bf16: row tiles of several sizes have helpers of their own in one kernel."""
    check(Layer(20, 72, 40, act, scheme=scheme), target, tmp_path, (2, 20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_scheme(target: str, scheme: str, tmp_path: Path) -> None:
    for act in DTYPES:
        (folder := tmp_path / act).mkdir()
        layer = Layer(60, 136, 77, act, biased=act == "f16", limited=act == "bf16", gelu=act == "f16", scheme=scheme)
        check(layer, target, folder, (1, 2, 4, 60))


@pytest.mark.exhaustive
@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_many_tokens_and_panels(target: str, act: str, tmp_path: Path) -> None:
    for biased in (False, True):
        layer = Layer(390, 330, 211, act, biased=biased)
        (folder := tmp_path / str(biased)).mkdir()
        check(layer, target, folder, (1, 2, 4, 5, 33, 390))
