"""A model with all that attention knows, compiled: the logits of the eager one, and its bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.many_scores import WITH_ALL, checkpoint_with_all
from support.new_family import registered, targets_here
from support.parity import check_bits
from support.quirky_model import eager_logits

# Few kernels: all graphs have the rows of one register tile.
LADDER = "prefill=[2]x[16,32],decode=[3]x[64]"


def check(target: str, kv_dtype: str, folder: Path, cache: Path) -> None:
    with registered(WITH_ALL):
        model = checkpoint_with_all(folder / "model")
        with compile_tiny(
            model, folder / "out", cache, buckets=LADDER, dtype="f32", target=target, kv_dtype=kv_dtype
        ) as artifact:
            tokens = random_tokens(artifact.info.vocab_size, 48)
            bound = {"f32": 1e-4, "int8": 5e-2}[kv_dtype]
            check_every_bucket(artifact, tokens, eager_logits(model, tokens, "f32"), bound)
            check_bits(artifact)


def test_compiled(tmp_path: Path, kernel_cache: Path) -> None:
    check(targets_here()[0], "f32", tmp_path, kernel_cache)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_on_every_target(kv_dtype: str, tmp_path: Path, kernel_cache: Path) -> None:
    for target in targets_here():
        check(target, kv_dtype, tmp_path / target, kernel_cache)
