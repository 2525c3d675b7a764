"""Bits between instruction sets: what is promised, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.quantize import QuantConfig
from llmc.runtime.binding import Engine, SamplingParams

from support.compiled import compile_tiny
from support.engine_driver import bits, drive, greedy, random_ids
from support.kernel_harness import targets_here
from support.marks import rare
from support.tiny_models import ModelFields, make_tiny_model

TARGETS = targets_here("znver4", "x86-64-v4", "x86-64-v3")
LADDER = "prefill=[1,3]x[32],decode=[1,3]x[64]"


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        rare("f32", None),
        ("bf16", None),
        ("bf16", "w8a8"),
        rare("bf16", "w4a8"),
        rare("f32", "w4a16"),
        rare("f16", None),
        ("f16", "w4a16"),
    ],
)
def test_levels_without_bf16_dots_give_the_same_bits(
    dtype: str, quant: str | None, tmp_path: Path, kernel_cache: Path
) -> None:
    """The order of every sum is the model's, however wide the registers are; with f32 the dots do not matter either."""
    # Widths that every scheme packs.
    sizes: ModelFields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads: ModelFields = {"num_attention_heads": 2, "num_key_value_heads": 1}
    fields: ModelFields = {**sizes, **heads}
    model = make_tiny_model(tmp_path / "model", "qwen3", **fields)
    sampled = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True, num_logprobs=3)
    requests = [(random_ids(1, 30), greedy(20, num_logprobs=5)), (random_ids(2, 7), sampled)]
    found = {}
    for target in TARGETS:
        # Vectors and tile registers alike: both round other operands, in another order.
        if dtype == "bf16" and (target.bf16_dot or target.bf16_tiles):
            continue
        options: dict[str, object] = {"buckets": LADDER, "dtype": dtype, "target": target.name, "block_size": 16}
        artifact = compile_tiny(
            model, tmp_path / target.name, kernel_cache, quant=QuantConfig(quant) if quant else None, **options
        )
        with artifact, Engine(artifact, num_threads=2, num_blocks=16) as engine:
            found[target.name] = [bits(output) for outputs in drive(engine, requests) for output in outputs]
    if len(found) < 2:
        pytest.skip("this machine has one such level")
    first, *others = found.values()
    assert len(first[0][0]) == 20
    assert all(other == first for other in others), list(found)
