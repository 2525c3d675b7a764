"""Every family compiled for every target here, against transformers on the same weights: padded buckets included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.models.eager import load_model
from llmc.models.registry import FAMILIES
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, relative_error, replay
from support.families import CASES
from support.marks import rare
from support.new_family import targets_here
from support.opencl import missing_opencl
from support.paged_reference import PagedRunner
from support.parity import check_bits, reference_logits
from support.quantized_model import rounded
from support.sixteen_bits import clear_text, in_float32
from support.tiny_models import make_tiny_model
from support.verified import Claim, on_targets, verifies

# Two prompts in two sizes, steps of one and of three sequences: every kind of graph, little to compile.
LADDER = "prefill=[2]x[16,32],decode=[1,3]x[64]"
# Of the families that write text; those that give vectors are test_vector_models.py's.
WRITING = [name for name, family in FAMILIES.items() if family.generates]
FIRST = {family: next(case for case, (of, _) in CASES.items() if of == family) for family in WRITING}
# That have between them every kind of block, of norm, of order of rows and of positions, and some that share theirs.
DISTINCT = ("cohere2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "minimax-windows", "qwen2_moe")
ALIKE = ("granite", "olmo2", "phi3")
# Whose norms, sums and choices are not all of the kind that every model has.
IN_16_BITS, LATENT = ("gemma3_text", "olmo2"), "deepseek_v2-lite"
# Seven layers that each correct all streams: roundings add up to more.
BOUNDS_IN_F16 = {"gemma3n": 1e-2, "gemma3n_text": 1e-2}
# In bounds; a model that roundings change more judges nothing.
MOST_OF_EAGER = 4.0
# Of the eager model's error: as many roundings, in another order.
ROUNDED_ELSEWHERE = 1.5
MORE_TEXTS = (4, 5, 6)


def check(case: str, target: str, folder: Path, cache: Path) -> None:
    family, overrides = CASES[case]
    model = make_tiny_model(folder / "model", family, **overrides)
    with compile_tiny(model, folder / "out", cache, buckets=LADDER, dtype="f32", target=target) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens))
        check_bits(artifact)


@verifies(lambda case: [Claim(CASES[case][0])])
@pytest.mark.parametrize("case", [*DISTINCT, *map(rare, ALIKE)])
def test_compiled(case: str, tmp_path: Path, kernel_cache: Path) -> None:
    check(case, targets_here()[0], tmp_path, kernel_cache)


@verifies(lambda case: [Claim(CASES[case][0], dtype="bf16")])
@pytest.mark.parametrize(
    "case",
    [
        *IN_16_BITS,
        pytest.param(LATENT, marks=pytest.mark.slow),
        *map(
            rare, sorted(case for case, (of, _) in CASES.items() if of in WRITING and case not in (*IN_16_BITS, LATENT))
        ),
    ],
)
def test_in_16_bits(case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Close to float32 where models are deep in nothing but roundings."""
    check_16_bits(case, "bf16", 3e-2, tmp_path, kernel_cache)


@verifies(lambda family: [Claim(family, dtype="f16")])
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WRITING)
def test_every_family_in_f16(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    check_16_bits(FIRST[family], "f16", BOUNDS_IN_F16.get(family, 5e-3), tmp_path, kernel_cache)


def check_16_bits(case: str, dtype: str, bound: float, folder: Path, cache: Path) -> None:
    """Within `bound` of float32, or about as far from it as the eager model in 16 bits, where that is not."""
    family, overrides = CASES[case]
    model = make_tiny_model(folder / "model", family, **overrides)
    target = targets_here()[0]
    with compile_tiny(model, folder / "out", cache, buckets=LADDER, dtype=dtype, target=target) as artifact:
        tokens = clear_text(model, dtype, 48)
        expected, eager = errors_of_eager(model, dtype, tokens)
        assert eager.max() < MOST_OF_EAGER * bound
        if ROUNDED_ELSEWHERE * eager.max() > bound:
            # Of one text, the largest error is chance, and where one row has most of it, so is the mean.
            found = [errors_of_decode(artifact, tokens, expected)]
            for seed in MORE_TEXTS:
                text = clear_text(model, dtype, len(tokens), seed)
                wanted, of_text = errors_of_eager(model, dtype, text)
                eager = np.concatenate([eager, of_text])
                found.append(errors_of_decode(artifact, text, wanted))
            assert rms(np.concatenate(found)) < ROUNDED_ELSEWHERE * rms(eager)
        allowed = min(max(bound, ROUNDED_ELSEWHERE * eager.max()), MOST_OF_EAGER * bound)
        check_every_bucket(artifact, tokens, expected, allowed)
        check_bits(artifact)


def errors_of_eager(model: Path, dtype: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits in float32 [T, V], and how far the eager model in 16 bits is from each row [T]."""
    expected = PagedRunner(in_float32(model, dtype)).step([tokens])[0].numpy()
    found = PagedRunner(load_model(model, dtype)).step([tokens])[0].numpy()
    return expected, np.array([*map(relative_error, found, expected)])


def errors_of_decode(artifact: Artifact, tokens: list[int], expected: np.ndarray) -> np.ndarray:
    """How far steps of one token are from each row of `expected` [T]."""
    decode = next(i for i, graph in enumerate(artifact.graphs()) if graph.phase == "decode")
    replayer, pages = Replayer(artifact, num_threads=1, num_blocks=64), Pages(64, artifact.info.block_size)
    found = (replay(replayer, decode, pages, [(0, [token], at)])[0] for at, token in enumerate(tokens))
    return np.array([*map(relative_error, found, expected)])


def rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


@verifies(lambda family, scheme: [Claim(family, scheme=scheme)])
@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize("family", WRITING)
def test_every_family_rounded(family: str, scheme: str, tmp_path: Path, kernel_cache: Path) -> None:
    """The logits of what rounded numbers stand for."""
    _, overrides = CASES[FIRST[family]]
    model, quant = make_tiny_model(tmp_path / "model", family, **overrides), QuantConfig(scheme)
    options = {"buckets": LADDER, "dtype": "f32", "target": targets_here()[0], "quant": quant}
    with compile_tiny(model, tmp_path / "out", kernel_cache, **options) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, PagedRunner(rounded(model, quant)).step([tokens])[0].numpy())
        check_bits(artifact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"), [("qwen", {"seq_length": 32}), ("telechat", {"training_seqlen": 48, "base_seqlen": 32})]
)
def test_beyond_the_length_of_training(family: str, fields: dict[str, Any], tmp_path: Path, kernel_cache: Path) -> None:
    """The end of the longest text, in prefill and in decode."""
    model = make_tiny_model(tmp_path / "model", family, **fields)
    tokens = random_tokens(515, 128)
    expected = reference_logits(model, tokens)[-2:]
    for target in targets_here():
        options = {"buckets": "prefill=1x128,decode=1x128", "dtype": "f32", "target": target, "max_model_len": 128}
        with compile_tiny(model, tmp_path / target, kernel_cache, **options) as artifact:
            graphs = {graph.phase: index for index, graph in enumerate(artifact.graphs())}
            replayer, pages = Replayer(artifact, num_threads=2, num_blocks=8), Pages(8, artifact.info.block_size)
            rows = [
                replay(replayer, graphs["prefill"], pages, [(0, tokens[:127], 0)])[0],
                replay(replayer, graphs["decode"], pages, [(0, tokens[127:], 127)])[0],
            ]
            assert relative_error(np.array(rows), expected) < 1e-4, target


@verifies(lambda family: on_targets(Claim(family)))
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WRITING)
def test_every_family_on_every_target(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    for target in (*targets_here(), *([] if missing_opencl() else ["opencl"])):
        check(FIRST[family], target, tmp_path / target, kernel_cache)
