"""Ladder families, the extended spec grammar, and bucket files in every form."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.buckets import (
    Bucket,
    BucketError,
    BucketLadder,
    Limits,
    exponential,
    format_spec,
    padding_bounded,
    parse_spec,
    ramp_up,
)
from llmc.buckets.bucket import MAX_BUCKETS, MAX_DIM
from llmc.buckets.files import format_file, write_file
from llmc.buckets.gaudi import parse_gaudi
from llmc.buckets.ladder import default_limit

LIMITS = Limits(max_num_seqs=4, max_model_len=2048, block_size=128)
sizes = st.integers(1, 5000)


def ladder_or_sentence(make: Callable[[], BucketLadder]) -> BucketLadder | str:
    """What `make` gives, or the message of its BucketError, which is one line."""
    try:
        return make()
    except BucketError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return message


# ---- exponential ---------------------------------------------------------------------------------------------------


def test_exponential_example_of_the_gaudi_plugin() -> None:
    # The worked example in the docstring of warmup_range_with_limit.
    assert exponential(128, 2048, 128, 10) == (128, 256, 384, 512, 640, 896, 1152, 1536, 2048)


def test_exponential_prompt_lengths_of_the_documented_log() -> None:
    # "seq:[128, 128, 1024, 11]" in the plugin's page on its bucketing mechanism, then the queries of the 36 buckets.
    assert exponential(128, 1024, 128, 11) == tuple(range(128, 1025, 128))
    # Today's plugin counts one less on the query axis, and only there.
    assert (default_limit(1024), default_limit(1024, query=True)) == (11, 10)
    assert parse_spec("prefill=1x128:128:2048:exp,decode=1x1") == parse_spec(
        "prefill=1x[128,256,384,512,768,896,1280,1664,2048],decode=1x1"
    )


def test_exponential_with_a_minimum_of_one_starts_at_the_step() -> None:
    # The plugin's decode batches and blocks of --max-num-seqs 16, --max-model-len 4096, blocks of 128.
    assert exponential(1, 16, 2, 5) == (1, 2, 4, 6, 10, 16)
    assert exponential(1, 512, 16, 10) == (1, 16, 32, 48, 64, 80, 112, 176, 240, 352, 512)


@given(sizes, sizes, st.integers(1, 600), st.integers(1, 64))
def test_exponential_ascends_within_the_limit(a: int, b: int, step: int, limit: int) -> None:
    low, high = min(a, b), max(a, b)
    ladder = exponential(low, high, step, limit)
    assert ladder[-1] == high
    assert ladder[0] == (low if limit > 1 else high)
    assert len(ladder) <= limit + (low == 1 < step)
    assert all(x < y for x, y in pairwise(ladder))
    assert all(size % step == 0 for size in ladder[1:-1])


# ---- padding-bounded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "cap", "stable"),
    [(0, 64, (16, 24, 32, 40, 48, 56, 64)), (50, 64, (16, 32, 64)), (50, 16, (16, 32, 48, 64))],
)
def test_padding_examples_of_the_gaudi_plugin(percent: float, cap: int, stable: tuple[int, ...]) -> None:
    # (0, 8, 64, pad_max, pad_percent) in the plugin's documentation, without its size 0.
    assert padding_bounded(1, 8, 64, percent, cap) == (1, 2, 4, 8, *stable)
    assert parse_spec(f"prefill=1x1:8:64:pad:{percent}:{cap},decode=1x1").prefill[-1].seq == 64


def test_padding_example_without_ramp_up() -> None:
    assert padding_bounded(16, 16, 128, 25, 32) == (16, 32, 48, 64, 80, 96, 128)


@given(sizes, sizes, st.floats(0, 99), st.none() | st.integers(0, 2000))
def test_every_length_pads_within_the_bound(a: int, b: int, percent: float, cap: int | None) -> None:
    low, high = min(a, b), min(max(a, b), min(a, b) + MAX_BUCKETS - 1)
    ladder = padding_bounded(low, 1, high, percent, cap)
    assert ladder[0] == low
    assert ladder[-1] == high
    for below, size in pairwise(ladder):
        padding = size - below - 1
        assert padding * 100 <= percent * size * (1 + 1e-12)
        assert cap is None or padding <= cap


@given(sizes, st.integers(2, 300), sizes, st.floats(0, 99), st.none() | st.integers(0, 2000))
def test_padding_bounded_thins_ramp_up_and_nothing_more(
    a: int, step: int, b: int, percent: float, cap: int | None
) -> None:
    low, high = min(a, b), max(a, b)
    candidates, ladder = ramp_up(low, step, high), padding_bounded(low, step, high, percent, cap)
    assert set(ladder) <= set(candidates)
    assert (ladder[0], ladder[-1]) == (candidates[0], candidates[-1])

    def holds(below: int, size: int) -> bool:
        padding = size - below - 1
        return padding * 100 <= percent * size * (1 + 1e-12) and (cap is None or padding <= cap)

    for below, size in pairwise(ladder):
        assert holds(below, size) or candidates[candidates.index(below) + 1] == size
    for below, _, above in zip(ladder, ladder[1:], ladder[2:], strict=False):
        assert below < step or not (holds(below, above) and percent > 0), "a size that could be left out was kept"


@given(st.integers(1, 9))
def test_a_looser_bound_never_needs_more_sizes(tens: int) -> None:
    assert len(padding_bounded(32, 32, 8192, 10 * tens)) <= len(padding_bounded(32, 32, 8192, 10 * tens - 10))


# ---- grammar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "equivalent"),
    [
        ("prefill=1x128:128:2048:exp:10,decode=1x1", "prefill=1x[128,256,384,512,640,896,1152,1536,2048],decode=1x1"),
        ("prefill=1x128,decode=1x128:128:1024:exp", "prefill=1x128,decode=1x128:128:1024"),
        ("prefill=1x[128,256]+[2,4]x128,decode=4x128 + 1x256", "prefill=1x[128,256]+[2,4]x128,decode=[4]x128+1x256"),
        ("prefill=1x128+1x[128],decode=1x1", None),
        ("prefill=1x16:16:128:pad:25:32,decode=1x1", "prefill=1x[16,32,48,64,80,96,128],decode=1x1"),
        ("prefill=1x64:pad:5,decode=1x1", None),
        ("prefill=1:4:maxx128:128:max,decode=maxxmax", "prefill=[1,2,4]x128:128:2048,decode=4x2048"),
        ("prefill=1x256x[0,4,8]blk,decode=1x[1,2]blk", "prefill=1x256,decode=1x[128,256]"),
        ("prefill=1x256x0:1:maxblk,decode=1x1:4:maxblk", "prefill=1x256,decode=1x[128,256,512,1024,1536,2048]"),
        ("prefill=1x1blk,decode=1x1", None),
        ("prefill=1x1,decode=1x128x1blk", None),
        ("prefill=1x1x0:1:4,decode=1x1", None),
        ("prefill=0:1:4x1,decode=1x1", None),
        ("prefill=1x1,decode=1x0blk", None),
        ("prefill=1x1:1:4:pad:100,decode=1x1", None),
        ("prefill=1x1:1:4:pad:x,decode=1x1", None),
        ("prefill=1x1:1:4:pad:5:6:7,decode=1x1", None),
        ("prefill=1x1:1:4:gap:5,decode=1x1", None),
        ("prefill=1x1:1:4:exp:0,decode=1x1", None),
        ("prefill=1x1:exp:4:5,decode=1x1", None),
        (
            "mixed=2:32:maxx64:exp:max,prefill=1x1,decode=1x1",
            "prefill=1x1,decode=1x1,mixed=[2,4]x[64,128,256,512,1024,2048]",
        ),
        ("prefill=1x1,decode=1x1,mixed=1x1blk", None),
        ("prefill=1x1,decode=1x1,mixed=1x64x1blk", None),
        ("prefill=1x1,decode=1x1,mixed=8x4", None),
        ("prefill=1x1,mixed=1x1", None),
    ],
)
def test_axis_forms(spec: str, equivalent: str | None) -> None:
    if equivalent is None:
        with pytest.raises(BucketError):
            parse_spec(spec, LIMITS)
    else:
        assert parse_spec(spec, LIMITS) == parse_spec(equivalent)


def test_limits_are_asked_for_by_name() -> None:
    with pytest.raises(BucketError, match="max-model-len"):
        parse_spec("prefill=1x128:128:max,decode=1x1")
    with pytest.raises(BucketError, match="block size"):
        parse_spec("prefill=1x128,decode=1x4blk")


pairs = st.lists(st.tuples(st.integers(1, 64), sizes), min_size=1, max_size=30, unique=True)
mixed_pairs = st.lists(st.tuples(st.integers(1, 64), st.integers(64, 5000)), max_size=30, unique=True)


@given(pairs, pairs, mixed_pairs)
def test_written_files_read_back(
    tmp_path_factory: Any, prefill: list[Any], decode: list[Any], mixed: list[Any]
) -> None:
    ladder = BucketLadder(
        tuple(Bucket("prefill", *p) for p in prefill),
        tuple(Bucket("decode", *d) for d in decode),
        tuple(Bucket("mixed", *m) for m in mixed),
    )
    folder = tmp_path_factory.mktemp("files")
    for name in ("b.toml", "b.json"):
        write_file(folder / name, ladder, "two\nlines")
        assert parse_spec(str(folder / name)) == ladder
    assert sorted(p.name for p in folder.iterdir()) == ["b.json", "b.toml"]
    assert parse_spec(format_spec(ladder)) == ladder


def test_the_text_of_a_ladder_is_short() -> None:
    text = "prefill=[1]x[128,256,512]+[2,4]x[128],decode=[1,4]x[512],mixed=[4]x[64]"
    assert format_spec(parse_spec(text)) == text


# ---- the limit of tokens -------------------------------------------------------------------------------------------


@given(pairs, mixed_pairs, st.integers(1, 300_000))
def test_the_limit_of_tokens_leaves_out_larger_buckets_and_nothing_else(
    prefill: list[Any], mixed: list[Any], most: int
) -> None:
    ladder = BucketLadder(
        tuple(Bucket("prefill", *p) for p in prefill),
        (Bucket("decode", 64, 5000),),
        tuple(Bucket("mixed", *m) for m in mixed),
    )
    kept = {b for b in ladder if b.phase == "decode" or b.max_tokens <= most}
    limited = ladder_or_sentence(lambda: parse_spec(format_spec(ladder), Limits(max_num_batched_tokens=most)))
    if any(all(b.phase != phase for b in kept) for phase in {b.phase for b in ladder}):
        assert isinstance(limited, str)
        assert f"max-num-batched-tokens is {most}" in limited
    else:
        assert not isinstance(limited, str)
        assert set(limited) == kept


def test_max_of_new_tokens_is_the_limit_of_tokens_where_that_is_less() -> None:
    limits = Limits(4, 2048, 128, 500)
    ladder = parse_spec("prefill=maxx128:128:max+1x128:128:max,decode=1xmax,mixed=4xmax", limits)
    assert [b.seq for b in ladder.prefill if b.batch == 1] == [128, 256, 384, 500]
    assert [b.seq for b in ladder.prefill if b.batch == 4] == []
    assert (ladder.mixed[0].seq, ladder.decode[0].seq) == (500, 2048)


def test_writing_fails_in_one_sentence(tmp_path: Path) -> None:
    ladder = parse_spec("prefill=1x1,decode=1x1")
    with pytest.raises(BucketError, match=r"b\.yaml"):
        write_file(tmp_path / "b.yaml", ladder)
    with pytest.raises(BucketError, match="cannot write"):
        write_file(tmp_path / "missing" / "b.toml", ladder)
    assert list(tmp_path.iterdir()) == []


# ---- the text form -------------------------------------------------------------------------------------------------


def test_documented_text_examples() -> None:
    # "Specifying Buckets in a File" and the sample bucketing_file.txt of the plugin.
    text = """
    # This is a comment
    (1, 2048, 0)
    (1, [256, 512], [0, 4, 8])   # six buckets there, two graphs here
    (64, 1, 1024)
    (32, 1, 512)
    (1, 1, 256)
    """
    grids = parse_gaudi(text, "b.txt", Limits(block_size=128))
    assert grids["prefill"] == [(1, 256), (1, 512), (1, 2048)]
    assert grids["decode"] == [(1, 256 * 128), (32, 16 * 128), (64, 16 * 128), (64, 256 * 128)]


def test_text_ranges_and_lists() -> None:
    limits = Limits(block_size=16)
    assert parse_gaudi("(1, 1, range(256, 512, 128))", "b", limits)["decode"] == [(1, 4096), (1, 6144)]
    grids = parse_gaudi("([1,2,4], range(128, 1024, 128), 0)\n(1,1,3,)", "b", limits)
    assert len(grids["prefill"]) == 3 * 7
    # ([64, 128, 256], 1, range(512, 1024, 32)) has 48 buckets there, of blocks in the whole batch.
    grids = parse_gaudi("([64, 128, 256], 1, range(512, 1024, 32))", "b", limits)
    assert grids["decode"][0] == (64, 8 * 16)
    assert grids["decode"][-1] == (256, 16 * 16)


def test_text_file_as_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("(1, [256, 512], 0)\n([1, 4], 1, [4, 32])\n")
    ladder = parse_spec(str(path), Limits(max_model_len=2000, block_size=128))
    assert [str(b) for b in ladder.decode] == ["decode:1x512", "decode:1x2000", "decode:4x128", "decode:4x1024",
                                               "decode:4x2000"]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "(1, 2)",
        "(1, 2, 3, 4)",
        "1, 2, 3",
        "(1, 2, 3",
        "(1, 2, 3))",
        "(1, [], 3)",
        "(1, [2, 3)",
        "(1, 2, x)",
        "(1, 2, 1.5)",
        "(1, 2, -3)",
        "(0, 2, 3)",
        "(1, 0, 3)",
        "(1, range(), 0)",
        "(1, range(1,2,3,4), 0)",
        "(1, range(1,9,0), 0)",
        "(1, range(9,1), 0)",
        "(1, range(0, 99999999), 0)",
        "(1, range(1,70), range(1,70))",
        "(1, 99999999999, 0)",
        "(1, 999999999, 0)",
        "(1, 2, __import__('os'))",
        "(1, [[2]], 0)",
        "(1, rangeX(2), 0)",
        "(1, 2, 0) (1, 2, 0)",
    ],
)
def test_bad_lines_name_file_and_line(line: str) -> None:
    with pytest.raises(BucketError, match=r"^b\.txt:2: ") as caught:
        parse_gaudi(f"(1, 128, 0)\n{line}\n", "b.txt", LIMITS)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.text(alphabet="(),[]range 0123456789-#\n", max_size=80))
@example("(" * 5000)
@example("([" + "1," * 20000 + "], 1, 1)")
def test_any_text_line_parses_or_is_a_bucket_error(text: str) -> None:
    try:
        grids = parse_gaudi(text, "b.txt", LIMITS)
    except BucketError:
        return
    assert all(pair[0] >= 1 and pair[1] >= 1 for pairs in grids.values() for pair in pairs)


@given(st.text(alphabet="prefildcomaxk=x:,[]+0123456789 -.", max_size=70))
@example("prefill=1:1:maxxmax,decode=maxxmax")
@example("prefill=1x0:0:4blk,decode=1x1")
@example("prefill=1x1x0:0:4blk,decode=1x1")
@example("prefill=1x16777216:1:16777216:pad:99,decode=1x16777216blk")
def test_any_spec_parses_or_is_a_bucket_error(text: str) -> None:
    ladder = ladder_or_sentence(lambda: parse_spec(text, LIMITS))
    if isinstance(ladder, str):
        assert "''" not in ladder, "an error quotes nothing"
    assert isinstance(ladder, str) or all(1 <= b.batch <= MAX_DIM and 1 <= b.seq <= MAX_DIM for b in ladder)


axis_parts = st.sampled_from(["", "1", "[", "]", "[]", "[1,", "1:", ":", "1:2:4", ":exp:", ":pad:", "blk", "max", " "])
spec_parts = st.sampled_from(["prefill=", "decode=1x1", "mixed=", "=", ",", "x", "+", "1x", "x1", "1x128"])


@given(st.lists(axis_parts | spec_parts, max_size=12).map("".join))
def test_any_torn_spec_is_one_sentence_that_quotes_something(text: str) -> None:
    message = ladder_or_sentence(lambda: parse_spec(text, LIMITS))
    if isinstance(message, str):
        assert "''" not in message
        assert ": " in message, "it does not say what to do"
        assert len(message) < 500


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ("1x", "prefill grid '1x' has no length: write BATCHxSEQ, like 1x128"),
        ("x128", "prefill grid 'x128' has no batch: write BATCHxSEQ, like 1x128"),
        ("1x8x", "prefill grid '1x8x' is not BATCHxSEQ: write it like 1:32:4x128:128:1024"),
        ("1x8xblk", "prefill grid '1x8xblk' has no context: write BATCHxSEQ, like 1x128"),
        ("", "prefill has no buckets behind the =: write prefill=BATCHxSEQ, like 1:32:4x128:128:1024"),
        ("1x8+", "'1x8+' has a + with no grid beside it: write BATCHxSEQ+BATCHxSEQ"),
        ("[]x8", "list '[]' is empty: write lists as [1,2,4]"),
        ("[1,]x8", "list '[1,]' has a comma with no number beside it: write lists as [1,2,4]"),
        ("1:4:x8", "'1:4:' has nothing where MAX belongs: write MIN:STEP:MAX"),
        ("1::4x8", "'1::4' has nothing where STEP belongs: write MIN:STEP:MAX"),
        ("1:4:4:pad:x8", "'1:4:4:pad:' has nothing where PERCENT belongs: write MIN:STEP:MAX"),
        ("1:4:4:exp:x8", "'1:4:4:exp:' has nothing where LIMIT belongs: write MIN:STEP:MAX"),
        ("1x8 decode=1x1", "prefill grid '1x8 decode=1x1' has an = in it: separate the phases by commas"),
        ("twox8", "'two' is not a size: use whole numbers from 1 to 16777216"),
    ],
)
def test_what_a_torn_grid_lacks_is_named(grid: str, sentence: str) -> None:
    with pytest.raises(BucketError) as caught:
        parse_spec(f"prefill={grid},decode=1x1")
    assert str(caught.value).startswith(sentence)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet="1x:[],", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["batch", "seq", "x"]), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "x"]), json_values))
def test_any_file_content_parses_or_is_a_bucket_error(tmp_path_factory: Any, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(content))
    assert ladder_or_sentence(lambda: parse_spec(str(path), LIMITS))


@pytest.mark.parametrize("suffix", [".txt", ".json", ".toml"])
@given(data=st.binary(max_size=60))
def test_any_bytes_parse_or_are_a_bucket_error(tmp_path_factory: Any, suffix: str, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(data)
    assert ladder_or_sentence(lambda: parse_spec(str(path), LIMITS))


def test_toml_is_readable() -> None:
    text = format_file(parse_spec("prefill=1x[8,16],decode=1x8"), ".toml", "why")
    assert text == "# why\nprefill = [\n  [1, 8],\n  [1, 16],\n]\ndecode = [\n  [1, 8],\n]\n"
