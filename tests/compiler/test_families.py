"""Every family compiled for every target here, against transformers on the same weights: padded buckets included."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.models.eager import load_model
from llmc.models.registry import FAMILIES

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.families import CASES
from support.marks import rare
from support.new_family import targets_here
from support.paged_reference import PagedRunner
from support.parity import check_bits, reference_logits
from support.tiny_models import make_tiny_model

# Two prompts in two sizes, steps of one and of three sequences: every kind of graph, little to compile.
LADDER = "prefill=[2]x[16,32],decode=[1,3]x[64]"
# Of the families that write text; those that give vectors are test_vector_models.py's.
WRITING = [name for name, family in FAMILIES.items() if family.generates]
FIRST = {family: next(case for case, (of, _) in CASES.items() if of == family) for family in WRITING}
# That have between them every block, norm, order of rows and kind of positions.
DISTINCT = (
    "cohere2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "olmo2", "phi3", "qwen2_moe",
    "stablelm-parallel",
)  # fmt: skip
# Whose norms, sums and choices are not all of the kind that every model has.
IN_16_BITS, LATENT = ("gemma3_text", "olmo2"), "deepseek_v2-lite"


def check(case: str, target: str, folder: Path, cache: Path) -> None:
    family, overrides = CASES[case]
    model = make_tiny_model(folder / "model", family, **overrides)
    with compile_tiny(model, folder / "out", cache, buckets=LADDER, dtype="f32", target=target) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens))
        check_bits(artifact)


@pytest.mark.parametrize("case", DISTINCT)
def test_compiled(case: str, tmp_path: Path, kernel_cache: Path) -> None:
    check(case, targets_here()[0], tmp_path, kernel_cache)


@pytest.mark.parametrize(
    "case",
    [
        *IN_16_BITS,
        pytest.param(LATENT, marks=pytest.mark.slow),
        *map(rare, sorted(CASES.keys() - {*IN_16_BITS, LATENT})),
    ],
)
def test_in_16_bits(case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Close to float32 where models are deep in nothing but roundings."""
    family, overrides = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    target = targets_here()[0]
    with compile_tiny(model, tmp_path / "out", kernel_cache, buckets=LADDER, dtype="bf16", target=target) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        expected = PagedRunner(load_model(model, "bf16")).step([tokens])[0].numpy()
        check_every_bucket(artifact, tokens, expected, 3e-2)
        check_bits(artifact)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_target(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    for target in targets_here():
        check(FIRST[family], target, tmp_path / target, kernel_cache)
