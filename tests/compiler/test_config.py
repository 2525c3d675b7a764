"""What a compilation refuses before it reads the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import MAX_BLOCK_SIZE, CompileConfig, CompileError


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"block_size": 0}, "block-size 0 must be a multiple of 16 from 16 to 65536"),
        ({"block_size": -16}, "block-size -16 must be a multiple of 16 from 16 to 65536"),
        ({"block_size": 24}, "block-size 24 must be a multiple of 16 from 16 to 65536"),
        ({"block_size": MAX_BLOCK_SIZE + 16}, "block-size 65552 must be a multiple of 16 from 16 to 65536"),
        ({"max_num_seqs": 0}, "max-num-seqs 0 must be between 1 and 4096"),
        ({"max_num_seqs": 4097}, "max-num-seqs 4097 must be between 1 and 4096"),
        ({"max_model_len": 0}, "max-model-len 0 must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max-num-batched-tokens 0 must be at least 1"),
        ({"jobs": -1}, r"jobs -1 must be 0 \(one a CPU\) or more"),
    ],
)
def test_limits_that_no_artifact_has(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CompileError, match=f"^{sentence}$"):
        CompileConfig(Path("model"), Path("out"), **given)


def test_the_largest_block_is_taken() -> None:
    assert CompileConfig(Path("model"), Path("out"), block_size=MAX_BLOCK_SIZE).block_size == MAX_BLOCK_SIZE
