"""docs/adding-a-target.md, followed to the end: its target compiles, runs and passes the device conformance suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets import Bucket
from llmc.compiler.config import CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.registry import KINDS, resolve_target, target_of
from llmc.runtime.binding import Artifact

from support.compiled import compile_tiny
from support.guide import followed, read_guide, run_tests
from support.tiny_models import make_tiny_model

needs_reference = pytest.mark.skipif(
    not resolve_target("reference").runs_here(), reason="the reference target's code is of another architecture"
)


@pytest.mark.slow
@needs_reference
def test_the_page_is_followed(tmp_path: Path) -> None:
    guide = read_guide("adding-a-target.md")
    with followed(guide, tmp_path):
        assert run_tests(guide, tmp_path) == 1
        spec = KernelSpec.of("linear", "linear")
        # It is no other target in the cache: only kernels of one op differ, and no code of the other's is taken.
        found, reference = resolve_target("twofold"), resolve_target("reference")
        assert found.code_key() != reference.code_key()
        assert found.layout_key() == reference.layout_key()
        assert found.template_digest(spec) != reference.template_digest(spec)
    assert list(KINDS) == ["cpu", "reference", "opencl", "cuda"]


@needs_reference
def test_its_artifacts_are_described_and_grow(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    out, ladder = tmp_path / "out", "prefill=[1]x[16],decode=[2]x[64]"
    with followed(read_guide("adding-a-target.md"), tmp_path / "guide"):
        compile_tiny(model, out, tmp_path / "cache", buckets=ladder, target="twofold").close()
        record = json.loads((out / "manifest.json").read_text())["target"]
        assert record == {"kind": "twofold", "name": "twofold", "machine": "x86_64"}
        assert target_of(record) == resolve_target("twofold")
        assert add_buckets(out, [Bucket("decode", 1, 64)], cache_dir=tmp_path / "cache").added == ("decode:1x64",)
    # An llmc without the target runs the artifact, and says why it cannot change it.
    with Artifact(out) as artifact:
        assert len(artifact.graphs()) == 3
    with pytest.raises(CompileError, match="no targets of kind 'twofold'; it has cpu, reference, opencl, cuda"):
        add_buckets(out, [Bucket("decode", 4, 64)], cache_dir=tmp_path / "cache")


def test_a_record_that_no_kind_wrote_is_refused() -> None:
    with pytest.raises(TargetError, match="no targets of kind 'abacus'"):
        target_of({"kind": "abacus", "name": "abacus"})
    with pytest.raises(TargetError, match="a target of kind 'reference' is not recorded so: 'nonsense'"):
        target_of({"kind": "reference", "name": "nonsense", "machine": "x86_64"})
