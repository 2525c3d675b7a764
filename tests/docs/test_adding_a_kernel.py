"""docs/adding-a-kernel.md, followed to the end: its op computes on every target, alone and in a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.compiler.build import build_kernels
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.registry import OPS, get_op
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets.registry import resolve_target

from support.guide import Guide, followed, read_guide, run_tests
from support.hardware_words import OF_A_CPU
from support.new_family import targets_here

pytestmark = pytest.mark.native
SPEC = KernelSpec.of("other", "running_mean", rows=0, dim=20)


@pytest.fixture
def guide() -> Guide:
    return read_guide("adding-a-kernel.md")


def test_the_op_knows_no_hardware(guide: Guide) -> None:
    assert OF_A_CPU.findall(guide.files["compiler/ops/running_mean.py"]) == []


def test_the_page_is_followed(guide: Guide, tmp_path: Path) -> None:
    with followed(guide, tmp_path):
        assert run_tests(guide, tmp_path) == 2
        made = torch.ops.llmc.running_mean(torch.tensor([[1.0, 3.0, 5.0]]))
        assert made.tolist() == [[1.0, 2.0, 3.0]]
    assert "running_mean" not in OPS


def test_the_op_is_as_any_other(guide: Guide, tmp_path: Path) -> None:
    """A shape of symbols comes from the one rule, and code is cached by the op's file."""
    with followed(guide, tmp_path):
        from llmc.compiler.ops.eager import define_ops

        define_ops()
        with torch.device("meta"):
            assert torch.ops.llmc.running_mean(torch.empty(5, 8)).shape == (5, 8)
        for name in targets_here():
            target, cache = resolve_target(name), GraphCache(tmp_path / "cache")
            (first,) = build_kernels([SPEC], target, cache, 1, lambda done, total: None)
            (second,) = build_kernels([SPEC], target, cache, 1, lambda done, total: None)
            assert (first.cached, second.cached, first.code) == (False, True, second.code)
            assert first.components["template"] != target.template_digest(KernelSpec.of("norm", "rms_norm"))
        assert get_op("running_mean").traced
