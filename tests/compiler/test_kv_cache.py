"""Whole models by the numbers of their KV cache, on both kinds of target: close to transformers, and their own bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.config import CompileConfig, CompileError
from llmc.manifest import read_manifest

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.parity import FAMILIES, check_bits, reference_logits
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native

LADDER = "prefill=[2]x[32],decode=[3]x[64]"
BOUNDS = {"f32": 1e-4, "f16": 1e-3, "bf16": 8e-3}
"""Of the relative error of logits, by what the cache rounds numbers to; activations are f32."""


@pytest.mark.parametrize("target", ["native", "reference"])
@pytest.mark.parametrize("name", ["mistral-window", "qwen3-gqa7"])
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_logits_and_bits(kv_dtype: str, name: str, target: str, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": LADDER, "dtype": "f32", "kv_dtype": kv_dtype, "target": target}
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, **options)
    assert read_manifest(tmp_path / "out")["kv_dtype"] == kv_dtype
    tokens = random_tokens(artifact.info.vocab_size, 48)
    check_every_bucket(artifact, tokens, reference_logits(model, tokens), BOUNDS[kv_dtype])
    check_bits(artifact)


def test_an_unknown_dtype_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^kv_dtype 'int4' is not one of auto, f32, bf16, f16$"):
        CompileConfig(model=tmp_path, output=tmp_path / "out", kv_dtype="int4")
