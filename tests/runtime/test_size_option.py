"""Sizes of Python's options are those of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.request_error import RequestError
from llmc.runtime.size_option import size_option


@pytest.mark.parametrize(
    ("value", "size"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("1GiB", 1 << 30), ("500MB", 500_000_000), (2e9, 2 * 10**9)],
)
def test_sizes(value: Any, size: int) -> None:
    assert size_option("kv_bytes", value) == size
    if not isinstance(value, str):
        assert size_option("kv_bytes", np.float64(value)) == size


@pytest.mark.parametrize("value", ["2 bananas", "", "-1", -1, 1.5, float("nan"), float("inf"), True, None, b"1GiB"])
def test_what_is_no_size_is_named(value: Any) -> None:
    with pytest.raises(RequestError, match=r"kv_bytes:? .* is not a size") as error:
        size_option("kv_bytes", value)
    assert repr(value) in str(error.value)


def test_an_engine_takes_a_size(chat_artifact: Path) -> None:
    with LLM(chat_artifact, num_threads=1, kv_bytes=1 << 18) as llm:
        blocks = llm.stats().num_blocks
    with LLM(chat_artifact, num_threads=1, kv_bytes="256KiB", swap_bytes="0") as llm:
        assert llm.stats().num_blocks == blocks
    with LLM(chat_artifact, num_threads=1, kv_bytes="256KiB", memory_utilization=0.5) as llm:
        assert llm.budget is not None
        assert llm.budget.kv_bytes == 1 << 18
    with pytest.raises(RequestError, match="kv_bytes: 'much' is not a size; write bytes"):
        LLM(chat_artifact, kv_bytes="much")
    with pytest.raises(RequestError, match="swap_bytes: 'much' is not a size; write bytes"):
        LLM(chat_artifact, swap_bytes="much")
