"""LLMC_*_BUCKET_* variables, the limit of tokens of a bucket, and buckets that no request could fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import BucketError, BucketLadder, Limits, default_ladder, parse_spec, ramp_up, read_environment
from llmc.buckets.environment import NAMES
from llmc.buckets.ladder import default_axes, default_tokens
from llmc.cli.main import main

from support.paths import ROOT

LIMITS = Limits(16, 4096, 32)
AXES = {"PROMPT_BS": "prompt_bs", "PROMPT_SEQ": "prompt_seq", "DECODE_BS": "decode_bs", "DECODE_SEQ": "decode_seq",
        "MIXED_BS": "mixed_bs", "MIXED_SEQ": "mixed_seq"}  # fmt: skip
server_limits = st.builds(
    Limits, st.integers(1, 256), st.integers(1, 1 << 16), st.sampled_from([16, 32, 128]),
    st.none() | st.integers(1, 1 << 16),
)  # fmt: skip


def ladder_of(environ: dict[str, str], limits: Limits = LIMITS) -> BucketLadder:
    variables = read_environment(environ)
    assert variables is not None
    return variables.ladder(limits)


def default_of(limits: Limits) -> BucketLadder:
    assert limits.max_num_seqs is not None
    assert limits.max_model_len is not None
    assert limits.block_size is not None
    return default_ladder(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.max_num_batched_tokens)


def test_no_variable_means_no_ladder() -> None:
    assert read_environment({"PATH": "/bin", "LLMC_CACHE_DIR": "x", "LLMC_API_KEY": "x"}) is None


@given(server_limits, st.sampled_from(sorted(AXES)), st.sampled_from(["MIN", "STEP", "MAX"]))
def test_a_variable_set_to_its_default_changes_nothing(limits: Limits, axis: str, number: str) -> None:
    assert limits.max_num_seqs is not None
    assert limits.max_model_len is not None
    assert limits.block_size is not None
    numbers = default_axes(
        limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.max_num_batched_tokens
    )[AXES[axis]]  # fmt: skip
    value = numbers[("MIN", "STEP", "MAX").index(number)]
    expected = default_of(limits)
    environ = {f"LLMC_{axis}_BUCKET_{number}": str(value)}
    if axis.startswith("MIXED") and not expected.mixed:
        with pytest.raises(BucketError, match="two sequences"):
            ladder_of(environ, limits)
    else:
        assert ladder_of(environ, limits) == expected


def test_the_default_limit_of_tokens_stays() -> None:
    for limits, graphs in ((Limits(64, 32768, 32), 199), (LIMITS, 122)):
        ladder = ladder_of({"LLMC_PROMPT_BS_BUCKET_MIN": "1"}, limits)
        assert len(ladder) == len(default_of(limits)) == graphs
        assert max(b.max_tokens for b in ladder.prefill) == limits.max_model_len


lengths = {"MIN": st.integers(1, 200), "STEP": st.integers(32, 2000), "MAX": st.integers(200, 4096)}
batches = {"MIN": st.integers(1, 16), "STEP": st.integers(1, 64), "MAX": st.integers(1, 16)}
set_lengths, set_batches = st.fixed_dictionaries({}, optional=lengths), st.fixed_dictionaries({}, optional=batches)


@given(set_lengths, set_lengths, set_batches, st.none() | st.integers(1, 1 << 14))
def test_what_is_set_changes_its_axis_alone(
    prompt_seq: dict[str, int], decode_seq: dict[str, int], prompt_bs: dict[str, int], tokens: int | None
) -> None:
    limits = Limits(16, 4096, 32, tokens)
    given_axes = {"PROMPT_SEQ": prompt_seq, "DECODE_SEQ": decode_seq, "PROMPT_BS": prompt_bs}
    environ = {f"LLMC_{a}_BUCKET_{n}": str(v) for a, values in given_axes.items() for n, v in values.items()}
    sizes: dict[str, tuple[int, ...]] = {}
    for axis, name in AXES.items():
        low, step, high = default_axes(16, 4096, 32, tokens)[name]
        values = given_axes.get(axis, {})
        high = values.get("MAX", high)
        low = values.get("MIN", min(low, high))
        if low > high:
            with pytest.raises(BucketError, match=f"LLMC_{axis}_BUCKET_MIN"):
                ladder_of(environ, limits)
            return
        sizes[name] = ramp_up(low, values.get("STEP", step), high)
    most = default_tokens(4096) if tokens is None else tokens
    prefill = {(b, s) for b in sizes["prompt_bs"] for s in sizes["prompt_seq"] if b * s <= most}
    if not environ:
        return
    if not prefill:
        with pytest.raises(BucketError, match="max-num-batched-tokens"):
            ladder_of(environ, limits)
        return
    ladder = ladder_of(environ, limits)
    assert {(b.batch, b.seq) for b in ladder.prefill} == prefill
    assert {(b.batch, b.seq) for b in ladder.decode} == {
        (b, s) for b in sizes["decode_bs"] for s in sizes["decode_seq"]
    }
    assert ladder.mixed == default_of(limits).mixed


def test_variables_of_the_documented_24_and_48_buckets() -> None:
    # "Understanding vLLM Logs" in Intel Gaudi's documentation of vLLM inference: --block-size 128, --max-num-seqs 4,
    # 2048 tokens: prompt bs [1, 32, 4], seq [128, 128, 1024]; decode bs [1, 128, 4], blocks [128, 128, 2048] in the
    # unit of the log (https://docs.habana.ai/en/latest/PyTorch/vLLM_Inference/vLLM_Inference.html).
    environ = {
        "LLMC_PROMPT_BS_BUCKET_STEP": "32",
        "LLMC_PROMPT_SEQ_BUCKET_MAX": "1024",
        "LLMC_DECODE_BS_BUCKET_STEP": "128",
        "LLMC_DECODE_SEQ_BUCKET_MIN": "128",
        "LLMC_DECODE_SEQ_BUCKET_STEP": "128",
    }
    ladder = ladder_of(environ, Limits(4, 2048, 128, 4096))
    assert (len(ladder.prefill), len(ladder.decode)) == (24, 48)
    assert {b.batch for b in ladder} == {1, 2, 4}


def test_ramp_up_and_padding_of_the_documentation() -> None:
    names = ("MIN", "STEP", "MAX", "PAD_PERCENT", "PAD_MAX")
    environ = {f"LLMC_DECODE_BS_BUCKET_{n}": v for n, v in zip(names[:3], ("2", "32", "64"), strict=True)}
    environ |= {f"LLMC_DECODE_SEQ_BUCKET_{n}": v for n, v in zip(names, ("16", "16", "128", "25", "32"), strict=True)}
    decode = ladder_of(environ, Limits(64, 512, 128)).decode
    assert sorted({b.batch for b in decode}) == [2, 4, 8, 16, 32, 64]
    assert sorted({b.seq for b in decode}) == [16, 32, 48, 64, 80, 96, 128]


def test_variables_of_mixed_buckets() -> None:
    environ = {f"LLMC_MIXED_SEQ_BUCKET_{n}": v for n, v in (("MIN", "64"), ("STEP", "64"), ("MAX", "192"))}
    assert [str(b) for b in ladder_of(environ).mixed] == ["mixed:16x64", "mixed:16x128", "mixed:16x192"]


def test_decode_blocks_are_those_of_a_sequence() -> None:
    environ = {"LLMC_DECODE_BLOCK_BUCKET_MIN": "1", "LLMC_DECODE_BLOCK_BUCKET_STEP": "4",
               "LLMC_PROMPT_BLOCK_BUCKET_MAX": "8"}  # fmt: skip
    ladder = ladder_of(environ, Limits(4, 2000, 128))
    assert sorted({b.seq for b in ladder.decode}) == [128, 256, 512, 1024, 1536, 2000]
    assert ladder.prefill == default_ladder(4, 2000, 128).prefill


@pytest.mark.parametrize("number", ["MIN", "MAX"])
def test_blocks_of_the_whole_batch_are_refused_and_not_cut_to_one_length(number: str) -> None:
    with pytest.raises(BucketError, match=rf"LLMC_DECODE_BLOCK_BUCKET_{number}=2048: .* one sequence .* import"):
        ladder_of({f"LLMC_DECODE_BLOCK_BUCKET_{number}": "2048"})


@given(st.integers(1, 128), st.integers(1, 300), st.integers(1, 128))
def test_decode_blocks_keep_every_length(low: int, step: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    values = zip(("MIN", "STEP", "MAX"), (low, step, high), strict=True)
    environ = {f"LLMC_DECODE_BLOCK_BUCKET_{number}": str(value) for number, value in values}
    seqs = {b.seq for b in ladder_of(environ).decode}
    assert seqs == {32 * count for count in ramp_up(low, step, high)}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"LLMC_PROMPT_BS_BUCKET_MIM": "1"}, "did you mean LLMC_PROMPT_BS_BUCKET_MIN?"),
        ({"LLMC_PROMPT_BATCH_BUCKET_MAX": "4"}, "did you mean LLMC_PROMPT_BS_BUCKET_MAX?"),
        ({"LLMC_PREFILL_SEQ_BUCKET_MAX": "4"}, "did you mean LLMC_PROMPT_SEQ_BUCKET_MAX?"),
        ({"LLMC_PROMPT_QUERY_BUCKET_STEP": "4"}, "did you mean LLMC_PROMPT_SEQ_BUCKET_STEP?"),
        ({"LLMC_PROMPT_CTX_BUCKET_MAX": "4"}, "did you mean LLMC_PROMPT_BLOCK_BUCKET_MAX?"),
        ({"LLMC_DECODE_BS_BUCKET_PADMAX": "4"}, "did you mean LLMC_DECODE_BS_BUCKET_PAD_MAX?"),
        ({"LLMC_DECODE_BS_MAX": "4"}, "did you mean LLMC_DECODE_BS_BUCKET_MAX?"),
        ({"llmc_decode_bs_bucket_max": "4"}, "did you mean LLMC_DECODE_BS_BUCKET_MAX?"),
        ({"LLMC_MIXED_BLOCK_BUCKET_MAX": "4"}, "did you mean LLMC_MIXED_"),
        ({"LLMC_BUCKETING_STRATEGY": "lin"}, "written with --buckets"),
        ({"LLMC_EXPONENTIAL_BUCKETING": "1"}, "written with --buckets"),
        ({"LLMC_PROMPT_BS_BUCKET_MIN": "one"}, "LLMC_PROMPT_BS_BUCKET_MIN is 'one'"),
        ({"LLMC_PROMPT_BS_BUCKET_MIN": ""}, "LLMC_PROMPT_BS_BUCKET_MIN is ''"),
        ({"LLMC_PROMPT_BS_BUCKET_MIN": "-1"}, "LLMC_PROMPT_BS_BUCKET_MIN is '-1'"),
        ({"LLMC_PROMPT_BS_BUCKET_MAX": "999999999"}, "LLMC_PROMPT_BS_BUCKET_MAX is '999999999'"),
        ({"LLMC_DECODE_SEQ_BUCKET_MAX": "4", "LLMC_DECODE_BLOCK_BUCKET_MAX": "4"}, "set tokens or blocks"),
        ({"LLMC_DECODE_BS_BUCKET_PAD_MAX": "4"}, "set both"),
    ],
)
def test_bad_variables_are_named(environ: dict[str, str], wanted: str) -> None:
    with pytest.raises(BucketError) as caught:
        read_environment(environ)
    assert wanted in str(caught.value)


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5000).map(str) | st.text(max_size=4)), server_limits)
def test_any_environment_is_a_ladder_or_a_bucket_error(environ: dict[str, str], limits: Limits) -> None:
    message = ""
    try:
        variables = read_environment(environ)
        ladder = None if variables is None else variables.ladder(limits)
    except BucketError as error:
        message = str(error)
    if message:
        assert "LLMC_" in message
        assert "\n" not in message
    else:
        assert (ladder is None) == (not environ)


@given(server_limits)
def test_the_default_ladder_keeps_the_limit_of_tokens_and_reaches(limits: Limits) -> None:
    assert limits.max_num_seqs is not None
    assert limits.max_model_len is not None
    ladder = default_of(limits)
    tokens = limits.max_num_batched_tokens
    most = max(2048, limits.max_model_len) if tokens is None else tokens
    assert max(b.max_tokens for b in (*ladder.prefill, *ladder.mixed)) <= most
    # The longest chunk that may be computed at once has a bucket, and so has every context.
    assert ladder.select("prefill", 1, min(most, limits.max_model_len)) is not None
    assert ladder.select("decode", limits.max_num_seqs, limits.max_model_len) is not None


# ---- what llmc compile makes of them -------------------------------------------------------------------------------


def resolved(tiny_model: Path, **options: Any) -> Any:
    pytest.importorskip("torch")
    from llmc.compiler.config import CompileConfig
    from llmc.compiler.resolve import resolve

    return resolve(CompileConfig(tiny_model, tiny_model, target="x86-64-v3", **options))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of which only the configuration is read; made for contexts of 512 tokens."""
    folder = tmp_path_factory.mktemp("model")
    source = ROOT / "examples" / "tiny-english" / "config.json"
    config = json.loads(source.read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == 512
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_limits_that_are_not_given_follow_the_ladder(model_dir: Path) -> None:
    default = resolved(model_dir)
    assert (default.max_num_seqs, default.max_model_len, default.max_num_batched_tokens) == (16, 512, 2048)
    spec = resolved(model_dir, buckets="prefill=[1,4]x64,decode=[1,32]x[64,256],mixed=32x128")
    assert (spec.max_num_seqs, spec.max_model_len, spec.max_num_batched_tokens) == (32, 256, 256)
    bounded = resolved(model_dir, buckets="prefill=[1,4]x64,decode=1x512", max_num_batched_tokens=100)
    assert [str(b) for b in bounded.ladder.prefill] == ["prefill:1x64"]
    assert bounded.max_num_batched_tokens == 100
    variables = read_environment({"LLMC_PROMPT_BS_BUCKET_MIN": "1"})
    assert resolved(model_dir, buckets=variables) == default


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"buckets": "prefill=1x128,decode=[1]x[100000]"}, ("decode:1x100000", "made for 512", "--max-model-len")),
        ({"buckets": "prefill=1x1024,decode=1x512"}, ("prefill:1x1024", "made for 512")),
        ({"buckets": "prefill=1x64,decode=1x512", "max_model_len": 256}, ("decode:1x512", "max-model-len is 256")),
        ({"buckets": "prefill=1x64,decode=8x512", "max_num_seqs": 4}, ("decode:8x512", "max-num-seqs is 4")),
        ({"buckets": "prefill=1x64,decode=4x512,mixed=4x2049"}, ("mixed:4x2049", "--max-model-len 513")),
        ({"buckets": "prefill=1x64,decode=5000x512"}, ("decode:5000x512", "max-num-seqs is 4096")),
    ],
)
def test_buckets_that_no_request_fills_are_refused(
    model_dir: Path, options: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(BucketError) as caught:
        resolved(model_dir, **options)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


def test_a_last_block_may_end_past_the_limit_and_longer_contexts_may_be_asked_for(model_dir: Path) -> None:
    assert resolved(model_dir, buckets="prefill=1x64,decode=1x512", max_model_len=500).max_model_len == 500
    longer = resolved(model_dir, buckets="prefill=1x64,decode=1x1024", max_model_len=1024)
    assert longer.max_model_len == 1024


def test_variables_reach_the_command(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    command = ["compile", str(model_dir), "-o", str(model_dir / "out")]
    monkeypatch.setenv("LLMC_PROMPT_SEQ_BUCKET_MAX", "1024")
    assert main(command) == 1
    assert "LLMC_PROMPT_SEQ_BUCKET_MAX: bucket prefill:1x640 holds 640 tokens" in capsys.readouterr().err
    monkeypatch.delenv("LLMC_PROMPT_SEQ_BUCKET_MAX")
    monkeypatch.setenv("LLMC_PROMPT_BS_BUCKET_MIN", "2")
    assert main([*command, "--max-model-len", "512", "--max-num-batched-tokens", "64"]) == 2
    assert "the smallest prefill bucket has 128 tokens but max-num-batched-tokens is 64" in capsys.readouterr().err
    monkeypatch.setenv("LLMC_PROMPT_BS_BUCKET_MIM", "1")
    assert main(command) == 2
    assert "did you mean LLMC_PROMPT_BS_BUCKET_MIN?" in capsys.readouterr().err


def test_a_spec_in_blocks_is_not_cut() -> None:
    assert [b.seq for b in parse_spec("prefill=1x1,decode=1x[1,200,300]blk", LIMITS).decode] == [32, 6400, 9600]
