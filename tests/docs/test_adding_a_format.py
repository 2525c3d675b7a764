"""docs/adding-a-format.md, followed to the end: its format is rounded to, packed, computed and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import resolve_target
from llmc.quantize import SCHEMES
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import FORMATS

from support.guide import followed, read_guide, run_tests
from support.new_family import targets_here

pytestmark = pytest.mark.native


@pytest.mark.slow
def test_the_page_is_followed(tmp_path: Path) -> None:
    guide = read_guide("adding-a-format.md")
    plain = KernelSpec.of("linear", "linear_quant", **Integers(8).kernel_params())
    before = {name: resolve_target(name).template_digest(plain) for name in targets_here()}
    with followed(guide, tmp_path):
        assert run_tests(guide, tmp_path) == 1
        powers = KernelSpec.of("linear", "linear_quant", **SCHEMES["p8a16"].weight.kernel_params())
        for name, digest in before.items():
            # Its kernels are its own in the cache, and those of others stay what they were.
            target = resolve_target(name)
            assert target.template_digest(plain) == digest != target.template_digest(powers)
    assert "p8a16" not in SCHEMES
    assert "powers" not in FORMATS
