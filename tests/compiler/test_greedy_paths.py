"""Every family, served: greedy ids and logits through prefill, chunks, decode and mixed graphs are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.registry import native_target, resolve_target

from support.compiled import compile_tiny
from support.families import CASES
from support.greedy_paths import LADDER, check_greedy_paths
from support.tiny_models import make_tiny_model
from support.verified import TARGETS, Claim, verifies

# Every time: latent attention; sinks and experts; layers without positions beside windows.
EVERY_TIME = {
    ("deepseek_v2-lite", "cpu"): (pytest.mark.native,),
    ("gpt_oss", "cpu"): (),
    ("cohere2", "reference"): (),
}
SLOW = {
    ("deepseek_v3", "cpu"): (pytest.mark.native, pytest.mark.slow),
    ("minicpm3", "cpu"): (pytest.mark.native, pytest.mark.slow),
    ("minicpm3", "reference"): (pytest.mark.slow,),
}


def cases() -> Iterator[Any]:
    """A model, then the kind of target: a model's trace is cached."""
    for case in CASES:
        for target in TARGETS:
            marks = {**EVERY_TIME, **SLOW}.get((case, target), (pytest.mark.exhaustive,))
            yield pytest.param(case, target, marks=marks)


@verifies(lambda case, target: [Claim(CASES[case][0], target=target, what="ids")])
@pytest.mark.parametrize(("case", "target"), list(cases()))
def test_greedy_ids_are_those_of_transformers(case: str, target: str, tmp_path: Path, kernel_cache: Path) -> None:
    name = native_target().name if target == "cpu" else target
    if not resolve_target(name).runs_here():
        pytest.skip(f"the code of {name} is of another architecture")
    family, overrides = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    # Blocks of models with a state would hold whole texts.
    options = {"buckets": LADDER, "dtype": "f32", "target": name, "block_size": 32}
    with compile_tiny(model, tmp_path / "out", kernel_cache, **options) as artifact:
        check_greedy_paths(artifact, model)
