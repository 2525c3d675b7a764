"""Settings and headers that others wrote: whatever is in them, only QuantizeError comes out, with one sentence.

`python -m bench.fuzz_checkpoints` does the same for as long as one likes.
"""

from __future__ import annotations

import pytest

from bench.fuzz_checkpoints import DOWN, HEAD, Q, Sample, fuzz, read, samples

NAMES = ("gptq", "auto-round", "awq", "awq-gemv", "awq-gemv-fast", "packed", "int8", "float", "nvfp4", "fp8", "fbgemm",
         "modelopt", "modelopt-mixed", "mxfp4", "nf4", "llm-int8")  # fmt: skip
ROUNDS = 60


@pytest.fixture(scope="module")
def known() -> dict[str, Sample]:
    found = samples()
    assert tuple(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_only_the_declared_error_comes_out(name: str, known: dict[str, Sample]) -> None:
    sample = known[name]
    read(sample.config, sample.beside, sample.entries, [Q, DOWN, HEAD])
    found = fuzz(name, sample, ROUNDS, 1)
    assert found["taken"] > 0
    assert found["QuantizeError"] > 0
