"""Whole models with experts: their checkpoints quantized by others, weights rounded by llmc, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.models.eager import load_model
from llmc.quantize import QuantConfig

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.families import CASES
from support.marks import rare
from support.mxfp4_experts import make_mxfp4_model
from support.new_family import targets_here
from support.paged_reference import PagedRunner
from support.parity import check_bits, reference_logits
from support.quantized_checkpoints import Tensors, make_quantized_model
from support.quantized_model import rounded
from support.stored_checkpoints import Integers, gptq_config, gptq_tensors
from support.tiny_models import make_tiny_model
from support.verified import Claim, on_targets, verifies

pytestmark = pytest.mark.native
LADDER = "prefill=[2]x[16,32],decode=[1,3]x[64]"
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def make_gptq_mixture(folder: Path) -> Path:
    """GPTQ's numbers for each matrix of each expert."""

    def quantized(prefix: str, weight: np.ndarray) -> Tensors:
        n, k = weight.shape
        data = Integers.random(n, k, 4, 32, symmetric=False, least_zero=1)
        return gptq_tensors(data, 4, 1, prefix)

    return make_quantized_model(folder, gptq_config(desc_act=False), quantized, "qwen3_moe", **MIXTURE)


@pytest.mark.slow
@verifies(lambda: on_targets(Claim("qwen3_moe", stored="gptq")))
def test_numbers_of_a_quantized_checkpoint_are_kept(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_gptq_mixture(tmp_path / "model")
    tokens = random_tokens(515, 48)
    expected = PagedRunner(load_model(model)).step([tokens])[0].numpy()
    for target in targets_here():
        out = tmp_path / target
        with compile_tiny(model, out, kernel_cache, buckets=LADDER, dtype="f32", target=target) as artifact:
            check_every_bucket(artifact, tokens, expected)
            check_bits(artifact)
        weights = json.loads((out / "manifest.json").read_text())["weights"]
        for kind in ("gate_up", "down"):
            said = weights[f"layers.1.mlp.experts.{kind}.weight"]
            assert (said["scheme"], said["method"]) == ("w4a16", "gptq")
        assert "scheme" not in weights["layers.1.mlp.router.weight"]


@pytest.mark.slow
@verifies(lambda: on_targets(Claim("gpt_oss", stored="mxfp4")))
def test_experts_as_published(tmp_path: Path, kernel_cache: Path) -> None:
    """Of gpt-oss: the logits of transformers on what the stored numbers stand for."""
    floats, model = make_mxfp4_model(tmp_path)
    tokens = random_tokens(90)
    expected = reference_logits(floats, tokens)
    buckets = "prefill=[1]x[32],decode=[1]x[64]"
    for target in targets_here():
        out = tmp_path / target
        with compile_tiny(model, out, kernel_cache, buckets=buckets, dtype="f32", target=target) as artifact:
            check_every_bucket(artifact, tokens, expected)
        weights = json.loads((out / "manifest.json").read_text())["weights"]
        kept = {name for name, weight in weights.items() if weight.get("method") == "mxfp4"}
        assert kept == {
            f"layers.{layer}.mlp.experts.{part}.weight" for layer in range(3) for part in ("gate_up", "down")
        }


@verifies(lambda scheme: on_targets(Claim("qwen2_moe", scheme=scheme)))
@pytest.mark.parametrize(
    "scheme",
    [*(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("w8a16", "nf4")), *map(rare, ("w4a16", "fp8"))],
)
def test_rounded_by_llmc(scheme: str, tmp_path: Path, kernel_cache: Path) -> None:
    family, overrides = CASES["qwen2_moe"]
    model, quant = make_tiny_model(tmp_path / "model", family, **overrides), QuantConfig(scheme)
    recipe = resolve(CompileConfig(model=model, output=tmp_path, quant=quant)).recipe
    assert not any("router" in name or "shared_gate" in name for name in recipe.schemes)
    tokens = random_tokens(515, 48)
    expected = PagedRunner(rounded(model, quant)).step([tokens])[0].numpy()
    for target in targets_here():
        out = tmp_path / target
        with compile_tiny(
            model, out, kernel_cache, buckets=LADDER, dtype="f32", target=target, quant=quant
        ) as artifact:
            check_every_bucket(artifact, tokens, expected)
            check_bits(artifact)
