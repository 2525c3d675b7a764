"""Ladders, specs, selection and the padding convention."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import (
    Bucket,
    BucketError,
    BucketLadder,
    default_ladder,
    exponential,
    parse_spec,
    ramp_up,
    select,
)
from llmc.buckets.bucket import MAX_BUCKETS

GAUDI = "prefill=1:32:4x128:128:1024,decode=1:128:4x128:128:2048"
sizes = st.integers(1, 4096)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((2, 32, 64), (2, 4, 8, 16, 32, 64)),
        ((128, 128, 512), (128, 256, 384, 512)),
        ((1, 32, 4), (1, 2, 4)),
        ((1, 1, 1), (1,)),
        ((3, 32, 70), (3, 6, 12, 24, 32, 64, 70)),
        ((200, 128, 512), (200, 256, 384, 512)),
        ((1, 128, 5), (1, 2, 4, 5)),
    ],
)
def test_ramp_up_examples(args: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    assert ramp_up(*args) == expected


@given(sizes, sizes, sizes)
def test_ramp_up_ascends_from_min_to_max(a: int, step: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    ladder = ramp_up(low, step, high)
    assert ladder[0] == low
    assert ladder[-1] == high
    assert all(x < y for x, y in pairwise(ladder))
    assert all(y - x <= max(step, x) for x, y in pairwise(ladder))


def test_exponential() -> None:
    assert exponential(1, 6) == (1, 2, 4, 6)
    assert exponential(16, 128) == (16, 32, 64, 128)


@given(st.sampled_from(["prefill", "decode", "mixed"]), sizes, sizes)
def test_bucket_text_round_trip(phase: str, batch: int, seq: int) -> None:
    bucket = Bucket(phase, batch, seq)
    assert Bucket.parse(str(bucket)) == bucket


def test_spec_of_the_gaudi_form_has_24_and_48_buckets() -> None:
    ladder = parse_spec(GAUDI)
    assert (len(ladder.prefill), len(ladder.decode)) == (24, 48)
    assert ladder.prefill[0] == Bucket("prefill", 1, 128)
    assert ladder.decode[-1] == Bucket("decode", 4, 2048)
    assert list(ladder) == [*ladder.prefill, *ladder.decode]
    assert parse_spec(" decode = 1:128:4 x 128:128:2048 , prefill = 1:32:4x128 : 128 :1024 ") == ladder


def test_explicit_lists_single_numbers_and_doubling() -> None:
    ladder = parse_spec("prefill=[1,2,4]x[128,512],decode=4x64:exp:256")
    assert [str(b) for b in ladder.decode] == ["decode:4x64", "decode:4x128", "decode:4x256"]
    assert len(ladder.prefill) == 6


def test_file_forms_agree(tmp_path: Path) -> None:
    expected = parse_spec("prefill=[1,2]x[64,128],decode=1:2:2x64")
    toml, as_json = tmp_path / "b.toml", tmp_path / "b.json"
    toml.write_text('decode = "1:2:2x64"\n[prefill]\nbatch = [1, 2]\nseq = "64:64:128"\n')
    as_json.write_text(json.dumps({"prefill": [[1, 64], [1, 128], [2, 64], [2, 128]], "decode": [[1, 64], [2, 64]]}))
    assert parse_spec(str(toml)) == expected
    assert parse_spec(str(as_json)) == expected


def test_a_ladder_always_has_prefill() -> None:
    """Also of a model of which it is not known yet whether it writes text."""
    assert parse_spec("prefill=1x128", phases=()).decode == ()
    with pytest.raises(BucketError, match="has no prefill buckets: add prefill=BATCHxSEQ"):
        parse_spec("decode=1x128", phases=())


@pytest.mark.parametrize(
    ("spec", "fragment"),
    [
        ("", "empty"),
        ("prefill", "PHASE=BATCHxSEQ"),
        ("prefill=1x1,decode=1x1,mixed=4x3", "4 sequences but 3 tokens"),
        ("prefill=1x128", "no decode"),
        ("decode=1x128", "no prefill"),
        ("prefill=0x128,decode=1x1", "0"),
        ("prefill=1x-128,decode=1x1", "-128"),
        ("prefill=4:2:1x128,decode=1x1", "min 4 above max 1"),
        ("prefill=1:0:4x128,decode=1x1", "step 0"),
        ("prefill=1:1:10000000x128,decode=1x1", "larger step"),
        ("prefill=1:1:100x1:1:100,decode=1x1", "10000 buckets"),
        ("prefill=1:1:64x1:1:64,decode=1x1", "4097 buckets"),
        ("prefill=1x99999999999999999999999,decode=1x1", "9999"),
        ("prefill=1x128,prefill=2x128,decode=1x1", "prefill twice"),
        ("prefill=[1,1]x128,decode=1x1", "given twice"),
        ("prefill=[]x128,decode=1x1", "is empty"),
        ("prefill=[1,2x128,decode=1x1", "brackets"),
        ("prefill=[[1]]x128,decode=1x1", "brackets"),
        ("prefil=1x128,decode=1x1", "'prefil'"),
        ("both=1x128", "'both'"),
        ("prefill=1x2x3,decode=1x1", "BATCHxSEQ"),
        ("prefill=1:2x3,decode=1x1", "MIN:STEP:MAX"),
        ("prefill=1x128,decode=1x1,", "a comma with nothing beside it"),
        ("/nowhere/b.toml", "/nowhere/b.toml"),
    ],
)
def test_absurd_specs_are_one_sentence(spec: str, fragment: str) -> None:
    with pytest.raises(BucketError) as caught:
        parse_spec(spec)
    message = str(caught.value)
    assert fragment in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"prefill": 3, "decode": "1x1"}',
        '{"prefill": [[1]], "decode": "1x1"}',
        '{"prefill": [[1, true]], "decode": "1x1"}',
        '{"prefill": [[1, 8], [1, 8]], "decode": "1x1"}',
        '{"prefill": {"batch": 1, "sequence": 8}, "decode": "1x1"}',
        '{"prefill": "1x1", "decode": "1x1", "other": 1}',
        '{"prefill": "1x1", "decode": {"batch": 1, "seq": [1, "2"]}}',
        '{"prefill": "1x1", "decode": {"batch": 1, "seq": null}}',
    ],
)
def test_bad_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(content)
    with pytest.raises(BucketError):
        parse_spec(str(path))


@given(st.text(alphabet="prefildco=x:,[]0123456789 -", max_size=60))
def test_any_text_parses_or_is_a_bucket_error(text: str) -> None:
    try:
        ladder = parse_spec(text)
    except BucketError:
        return
    assert 2 <= len(ladder) <= MAX_BUCKETS


@given(st.integers(1, 512), st.integers(1, 1 << 18), st.sampled_from([16, 32, 128]))
def test_default_ladder_covers_every_request(max_num_seqs: int, max_model_len: int, block_size: int) -> None:
    ladder = default_ladder(max_num_seqs, max_model_len, block_size)
    assert ladder.select("decode", max_num_seqs, max_model_len) is not None
    assert ladder.select("prefill", 1, max_model_len) is not None
    assert ladder.select("decode", max_num_seqs + 1, 1) is None
    tokens = max_num_seqs * min(2, max_model_len)
    assert (ladder.select("mixed", max_num_seqs, tokens) is not None) == (max_num_seqs > 1)
    assert len(ladder) < 2000


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 64)), min_size=1, max_size=20), sizes, sizes)
def test_select_is_the_first_that_fits(shapes: list[tuple[int, int]], num_seqs: int, length: int) -> None:
    buckets = [Bucket("decode", *shape) for shape in shapes]
    fitting = [b for b in buckets if b.batch >= num_seqs and b.seq >= length]
    chosen = select(buckets, num_seqs, length)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert chosen.batch == min(b.batch for b in fitting)
        assert chosen.seq == min(b.seq for b in fitting if b.batch == chosen.batch)


def test_select_takes_prefill_of_fewest_rows() -> None:
    wide, long = Bucket("prefill", 4, 64), Bucket("prefill", 1, 128)
    assert select([wide, long], 1, 64) == long


def test_ladder_rejects_wrong_phase_duplicates_and_empty() -> None:
    p, d = Bucket("prefill", 1, 8), Bucket("decode", 1, 8)
    for prefill, decode in [((), (d,)), ((p,), ()), ((d,), (d,)), ((p, p), (d,))]:
        with pytest.raises(BucketError):
            BucketLadder(prefill, decode)


@pytest.mark.parametrize(
    "text", ["decode", "decode:4", "decode:4x", "x:1x1", "decode:0x1", "decode:1x1x1", "decode:٣x1"]
)
def test_bad_bucket_text(text: str) -> None:
    with pytest.raises(BucketError):
        Bucket.parse(text)
