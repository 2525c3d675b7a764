"""Models, compiled for several numbers of ranks and of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model

from support.artifacts import made_once
from support.tiny_models import make_tiny_model
from support.word_tokenizer import save_words

SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
RANKS = (1, 2, 4)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[int, Path]:
    """By number of ranks. Copy before changing."""

    def make(folder: Path) -> None:
        make_tiny_model(folder / "model", "llama", **SIZES)
        save_words(folder / "model", SIZES["vocab_size"])
        for ranks in RANKS:
            compile_model(
                CompileConfig(
                    model=folder / "model",
                    output=folder / str(ranks),
                    cache_dir=kernel_cache,
                    dtype="f32",
                    block_size=16,
                    buckets="prefill=[1,2]x[16,32],decode=[1,4]x64,mixed=4x32",
                    jobs=1,
                    tensor_parallel=ranks,
                )
            )

    folder = made_once(tmp_path_factory, "ranks", make)
    return {ranks: folder / str(ranks) for ranks in RANKS}


STAGED_SIZES: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "tie_word_embeddings": True}
STAGED = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[tuple[int, int], Path]:
    """By number of ranks of a stage, and of stages. Copy before changing."""

    def make(folder: Path) -> None:
        make_tiny_model(folder / "model", "qwen3", **STAGED_SIZES)
        save_words(folder / "model", SIZES["vocab_size"])
        for ranks, stages in STAGED:
            compile_model(
                CompileConfig(
                    model=folder / "model",
                    output=folder / f"{ranks}-{stages}",
                    cache_dir=kernel_cache,
                    dtype="f32",
                    block_size=16,
                    buckets="prefill=[1,2]x[16,32],decode=[1,8]x64,mixed=8x32",
                    jobs=1,
                    tensor_parallel=ranks,
                    pipeline_parallel=stages,
                )
            )

    folder = made_once(tmp_path_factory, "stages", make)
    return {(ranks, stages): folder / f"{ranks}-{stages}" for ranks, stages in STAGED}
