from __future__ import annotations

import pytest

from llmc.buckets import BucketError, parse_spec
from llmc.buckets.verify_buckets import add_verify_buckets


def decode(spec: str, max_num_seqs: int, guesses: int) -> list[str]:
    return [str(b) for b in add_verify_buckets(parse_spec(spec), max_num_seqs, guesses).decode]


def test_rows_double_up_to_what_all_sequences_bring() -> None:
    # 3 sequences with 4 guesses each: 15 rows. Two and three rows are there already.
    assert decode("prefill=1x16,decode=[1,2,3]x64", 3, 4) == [
        *("decode:1x64", "decode:2x64", "decode:3x64", "decode:4x64", "decode:8x64", "decode:15x64")
    ]
    assert decode("prefill=1x16,decode=1x64", 1, 1) == ["decode:1x64", "decode:2x64"]
    assert decode("prefill=1x16,decode=[1,2,4]x64", 4, 0) == ["decode:1x64", "decode:2x64", "decode:4x64"]


def test_contexts_at_least_double_and_reach_the_longest() -> None:
    found = decode("prefill=1x16,decode=[1]x[16,32,48,64,96]", 1, 1)
    assert [b for b in found if b.startswith("decode:2")] == ["decode:2x16", "decode:2x48", "decode:2x96"]


def test_too_many_buckets() -> None:
    lengths = ",".join(str(1 << power) for power in range(4, 24))
    with pytest.raises(BucketError, match="more than the limit"):
        add_verify_buckets(
            parse_spec(f"prefill=1x16,decode=[{','.join(map(str, range(1, 204)))}]x[{lengths}]"), 204, 64
        )


def test_planned_rows_stay_as_they_are() -> None:
    assert decode("prefill=1x16,decode=[1,2,12]x64", 2, 7) == ["decode:1x64", "decode:2x64", "decode:12x64"]
