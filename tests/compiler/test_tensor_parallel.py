"""`llmc compile --tensor-parallel`: ranks in lockstep compute what one rank computes, and what cannot be divided is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.graphs_format import PHASES

from support.compiled import Pages, random_tokens, relative_error, replay
from support.lockstep import Lockstep
from support.tiny_models import make_tiny_model

LADDER = "prefill=2x16,decode=2x32,mixed=2x16"
SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
    "all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "parallel": ("gpt_neox", {"use_parallel_residual": True}),
    "layernorm": ("starcoder2", {"use_bias": True}),
    "sandwich": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}),
    "alibi": ("bloom", {}),
}


def compiled(model: Path, output: Path, cache: Path, **options: Any) -> Path:
    given = {"buckets": LADDER, "dtype": "f32", "block_size": 16, "jobs": 1, "tokenizer": "none", **options}
    compile_model(CompileConfig(model=model, output=output, cache_dir=cache, **given))
    return output


def logits(artifact: Path) -> tuple[Lockstep, np.ndarray]:
    """Of two prompts, then of steps that decode one and prefill the other."""
    machine, pages = Lockstep(artifact, 8), Pages(8, 16)
    prefill, decode, mixed = (machine.graph(phase) for phase in PHASES)
    a, b = random_tokens(500, 12, 1), random_tokens(500, 9, 2)
    found = [replay(machine, prefill, pages, [(0, a[:8], 0), (1, b[:3], 0)])]  # type: ignore[arg-type]
    found.append(replay(machine, decode, pages, [(0, a[8:9], 8), (1, b[3:4], 3)]))  # type: ignore[arg-type]
    found.append(replay(machine, mixed, pages, [(0, a[9:10], 9), (1, b[4:9], 4)]))  # type: ignore[arg-type]
    return machine, np.concatenate(found)


@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_compute_what_one_computes(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    family, fields = MODELS[name]
    model = make_tiny_model(tmp_path / "model", family, **{**SIZES, **fields})
    _, wanted = logits(compiled(model, tmp_path / "one", kernel_cache))
    machine, found = logits(compiled(model, tmp_path / "two", kernel_cache, tensor_parallel=2))
    assert machine.num_ranks == 2
    assert relative_error(found, wanted) < 1e-5
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
