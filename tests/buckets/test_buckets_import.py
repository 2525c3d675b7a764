"""Ladders taken over from vLLM on Intel Gaudi, against lists that the plugin's own code gave (data/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import BucketError, Limits, exponential, parse_spec
from llmc.buckets.grids import batch_axis, blocks_axis, parse_axis, seq_axis
from llmc.buckets.ladder import default_limit
from llmc.buckets.vllm import NAMES, Imported, VllmLimits, import_vllm, map_shapes, parse_env_file, plugin_server
from llmc.buckets.vllm_shapes import plugin_shapes
from llmc.cli.main import main

DATA = json.loads((Path(__file__).parent / "data" / "vllm_gaudi_shapes.json").read_text(encoding="utf-8"))
CONFIGURATIONS: list[dict[str, Any]] = DATA["configurations"]
PLAIN = VllmLimits(16, 4096, 2048, 128)
FLAGS = ["--max-num-seqs", "16", "--max-model-len", "4096", "--max-num-batched-tokens", "2048"]


def reader(case: dict[str, Any]) -> Callable[[str], str]:
    """Reads the one file of a configuration."""
    return lambda _name: str(case["file"])


def imported(case: dict[str, Any]) -> Imported:
    environ = dict(case["env"])
    if "file" in case:
        environ["VLLM_BUCKETING_FROM_FILE"] = "buckets.txt"
    return import_vllm(environ, VllmLimits(*case["limits"]), reader(case))


def listed(blocks: list[list[list[int]]]) -> list[tuple[int, ...]]:
    return sorted(shape for block in blocks for shape in product(*block))


def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_the_configurations_span_what_the_plugin_offers() -> None:
    assert len(CONFIGURATIONS) >= 300
    values = [case["env"] for case in CONFIGURATIONS]
    for name in NAMES:
        if "_BUCKET_" in name:
            assert any(name in environ for environ in values), name
    for strategy in ("exp", "lin", "pad"):
        assert sum(environ.get("VLLM_BUCKETING_STRATEGY") == strategy for environ in values) >= 20
    for switch in ("VLLM_EXPONENTIAL_BUCKETING", "VLLM_CONTIGUOUS_PA", "VLLM_PREFIX_CACHING", "VLLM_MERGED_PREFILL",
                   "PT_HPU_SDPA_QKV_SLICE_MODE_FWD"):  # fmt: skip
        assert sum(switch in environ for environ in values) >= 3, switch
    assert sum("file" in case for case in CONFIGURATIONS) >= 20


@pytest.mark.parametrize("part", range(6))
def test_the_plugin_s_lists_are_reproduced_and_become_a_ladder(part: int) -> None:
    for case in CONFIGURATIONS[part::6]:
        seqs, longest, _, block, _ = case["limits"]
        environ = case["env"] | ({"VLLM_BUCKETING_FROM_FILE": "buckets.txt"} if "file" in case else {})
        server = plugin_server(environ, VllmLimits(*case["limits"]), reader(case))
        shapes = plugin_shapes(server)
        assert list(shapes.prompt) == listed(case["prompt"]), case["env"]
        assert list(shapes.decode) == listed(case["decode"]), case["env"]
        ladder, _ = map_shapes(shapes, server)
        prompts = {(min(b, seqs), min(q, longest)) for b, q, _ in shapes.prompt if b > 0 and q > 0}
        decodes = {
            (min(b, seqs), min(longest, max(1, -(-blocks // min(b, seqs))) * block))
            for b, _, blocks in shapes.decode
            if b > 0
        }
        assert {(b.batch, b.seq) for b in ladder.prefill} == prompts, case["env"]
        assert {(b.batch, b.seq) for b in ladder.decode} == decodes | {(seqs, longest)}, case["env"]


def test_where_the_plugin_stops_there_is_one_sentence() -> None:
    assert len(DATA["refused"]) >= 15
    for case in DATA["refused"]:
        with pytest.raises(BucketError) as caught:
            imported(case)
        assert "VLLM_" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_plugin_s_exponential_axes_can_be_written() -> None:
    limits = Limits(256, 1 << 18, 16)
    meanings = {
        "prompt_bs": batch_axis(limits),
        "query": seq_axis("prefill", limits),
        "context": blocks_axis(limits, zero=True),
        "decode_bs": batch_axis(limits),
        "block": blocks_axis(limits),
    }
    axes = DATA["exponential"]
    assert len(axes["query"]) == 45
    for name, rows in axes.items():
        for low, step, high, limit, sizes in rows:
            assert parse_axis(f"{low}:{step}:{high}:exp:{limit}", meanings[name]) == tuple(sizes), (name, low, step)
            if low:
                assert exponential(low, high, step, limit) == tuple(sizes)
            # Its own limits are the default ones, but for a context of one block.
            if high > 1:
                assert default_limit(high, query=name == "query") == limit
                assert parse_axis(f"{low}:{step}:{high}:exp", meanings[name]) == tuple(sizes)


# ---- what is said about them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(5))
def test_no_effect_is_said_of_what_changes_nothing_and_only_of_that(part: int) -> None:
    for case in CONFIGURATIONS[part::50]:
        if "file" in case:
            continue
        found = imported(case)
        assert {one.variable for one in found.effects} == set(case["env"])
        for one in found.effects:
            environ = {name: value for name, value in case["env"].items() if name != one.variable}
            try:
                other = imported({**case, "env": environ})
            except BucketError:
                assert one.effect.startswith("needed: ")
                continue
            same = (other.shapes.prompt, other.shapes.decode) == (found.shapes.prompt, found.shapes.decode)
            assert one.effect.startswith("no effect: ") == same
            assert ("no graph here" in one.effect) == (not same and other.ladder == found.ladder)


@pytest.mark.parametrize(
    ("environ", "variable", "fragment"),
    [
        ({"VLLM_DECODE_BS_BUCKET_STEP": "8"}, "VLLM_DECODE_BS_BUCKET_STEP", "no effect: the exponential strategy"),
        (
            {"VLLM_BUCKETING_STRATEGY": "lin", "VLLM_PROMPT_CTX_BUCKET_STEP": "4"},
            "VLLM_PROMPT_CTX_BUCKET_STEP",
            "no graph here",
        ),
        (
            {"VLLM_BUCKETING_STRATEGY": "lin", "VLLM_PROMPT_BS_BUCKET_PAD_MAX": "4"},
            "VLLM_PROMPT_BS_BUCKET_PAD_MAX",
            "VLLM_BUCKETING_STRATEGY=pad alone reads it",
        ),
        (
            {
                "VLLM_BUCKETING_STRATEGY": "lin",
                "VLLM_PROMPT_QUERY_BUCKET_MAX": "512",
                "VLLM_PROMPT_SEQ_BUCKET_MAX": "256",
            },
            "VLLM_PROMPT_SEQ_BUCKET_MAX",
            "VLLM_PROMPT_QUERY_BUCKET_MAX wins over it",
        ),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "VLLM_PROMPT_BS_BUCKET_MAX", "prefill graphs +"),
        ({"VLLM_SKIP_WARMUP": "true"}, "VLLM_SKIP_WARMUP", "no effect"),
    ],
)
def test_effects(environ: dict[str, str], variable: str, fragment: str) -> None:
    found = {one.variable: one.effect for one in import_vllm(environ, PLAIN, str).effects}
    assert fragment in found[variable]


def test_decode_shapes_become_totals_of_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the whole batch are what the plugin counts."""
    found = import_vllm({}, replace(PLAIN, totals=True), str)
    shapes = {(min(batch, 16), blocks) for batch, _, blocks in found.shapes.decode if batch}
    expected = {f"decode:{b}x{min(max(blocks, b), 32 * b) * 128}total" for b, blocks in shapes} | {
        "decode:16x65536total"
    }
    assert {str(bucket) for bucket in found.ladder.decode} == expected
    assert found.ladder.prefill == import_vllm({}, PLAIN, str).ladder.prefill
    without_environment(monkeypatch)
    path = tmp_path / "buckets.toml"
    assert main(["buckets", "import", "--from-vllm-env", *FLAGS, "--totals", "-o", str(path)]) == 0
    assert parse_spec(str(path), Limits(16, 4096, 128)) == found.ladder


def test_changes_are_counted_and_say_why() -> None:
    environ = {"VLLM_BUCKETING_STRATEGY": "lin", "VLLM_DECODE_BS_BUCKET_MAX": "64", "VLLM_PROMPT_BS_BUCKET_MIN": "0",
               "VLLM_PROMPT_BS_BUCKET_MAX": "2"}  # fmt: skip
    found = import_vllm(environ, PLAIN, str)
    wide = sum(shape[0] > 16 for shape in found.shapes.decode)
    none = sum(shape[0] == 0 for shape in found.shapes.prompt)
    assert wide > 0
    assert none > 0
    assert f"decode: {wide} shapes of more than 16 sequences are cut to --max-num-seqs" in found.changes
    assert f"prompt: dropped {none} shapes of no sequence or no token" in found.changes
    assert any(change.startswith("prefill: ") and "block table" in change for change in found.changes)
    # 48 sequences are no multiple of the default step of 32: the plugin would compile that batch when it comes.
    odd = import_vllm({"VLLM_BUCKETING_STRATEGY": "lin"}, VllmLimits(48, 4096, 2048, 128), str)
    assert max(batch for batch, _, _ in odd.shapes.decode) == 32
    assert any("added 48x4096" in change for change in odd.changes)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "fragment"),
    [
        ({"VLLM_PROMPT_BS_BUCKET_MIM": "1"}, "did you mean VLLM_PROMPT_BS_BUCKET_MIN?"),
        ({"VLLM_PROMPT_QUERRY_BUCKET_MAX": "1"}, "did you mean VLLM_PROMPT_QUERY_BUCKET_MAX?"),
        ({"VLLM_DECODE_BLOCK_BUCKET_PADMAX": "1"}, "did you mean VLLM_DECODE_BLOCK_BUCKET_PAD_MAX?"),
        ({"VLLM_DECODE_BS_MAX": "1"}, "did you mean VLLM_DECODE_BS_BUCKET_MAX?"),
        ({"VLLM_BUCKETING_STRATEGIE": "lin"}, "did you mean VLLM_BUCKETING_STRATEGY?"),
        ({"vllm_bucketing_strategy": "lin"}, "did you mean VLLM_BUCKETING_STRATEGY?"),
        ({"VLLM_BUCKETING_STRATEGY": "linear"}, "set exp, lin or pad"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "maybe"}, "set true or false"),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": ""}, "VLLM_PROMPT_BS_BUCKET_MAX is ''"),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "-2"}, "VLLM_PROMPT_BS_BUCKET_MAX is '-2'"),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "0"}, "set 1 or more"),
        ({"VLLM_ENABLE_BUCKETING": "false"}, "unset it"),
        ({"VLLM_BUCKETING_STRATEGY": "pad", "VLLM_DECODE_BS_BUCKET_PAD_PERCENT": "51"}, "set 0 to 50"),
        ({"VLLM_BUCKETING_STRATEGY": "lin", "VLLM_DECODE_BS_BUCKET_STEP": "0"}, "STEP is 0"),
    ],
)
def test_bad_variables_are_named(environ: dict[str, str], fragment: str) -> None:
    with pytest.raises(BucketError) as caught:
        import_vllm(environ, PLAIN, str)
    assert fragment in str(caught.value)


def test_other_variables_of_vllm_are_none_of_our_business() -> None:
    others = {"VLLM_LOGGING_LEVEL": "x", "VLLM_PROMPT_USE_FUSEDSDPA": "1", "VLLM_DEFRAG": "1", "PATH": "/bin"}
    assert import_vllm(others, PLAIN, str).effects == ()


server_limits = st.builds(
    VllmLimits, st.integers(1, 64), st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([16, 128]),
    st.none() | st.integers(1, 3000),
)  # fmt: skip
numbers = st.integers(0, 2000).map(str)
strategies = st.sampled_from(["exp", "lin", "pad"])


@given(
    st.dictionaries(st.sampled_from([name for name in NAMES if "_BUCKET_" in name]), numbers, max_size=5),
    st.none() | strategies,
    st.booleans(),
    st.booleans(),
    server_limits,
)
def test_any_environment_is_a_ladder_that_reaches_or_one_sentence(
    environ: dict[str, str], strategy: str | None, contiguous: bool, merged: bool, limits: VllmLimits
) -> None:
    environ |= {"VLLM_CONTIGUOUS_PA": str(contiguous), "VLLM_MERGED_PREFILL": str(merged)}
    if strategy is not None:
        environ["VLLM_BUCKETING_STRATEGY"] = strategy
    message, found = "", None
    try:
        found = import_vllm(environ, limits, str)
    except BucketError as error:
        message = str(error)
    if found is None:
        assert message
        assert "\n" not in message
        return
    assert found.ladder.select("decode", limits.max_num_seqs, limits.max_model_len) is not None
    for bucket in found.ladder:
        assert bucket.batch <= limits.max_num_seqs
        assert bucket.seq <= limits.max_model_len
        if bucket.phase == "prefill" and not merged:
            assert bucket.max_tokens <= limits.max_num_batched_tokens


# ---- files and the command -----------------------------------------------------------------------------------------


def test_files_of_variables() -> None:
    text = """
    # a comment
    VLLM_PROMPT_BS_BUCKET_MAX=4   # of prompts
    export VLLM_BUCKETING_STRATEGY="lin"
    EMPTY=
    QUOTED='a # b' # c
    FROM_HERE
    NOT_HERE
    URL=http://x/#y
    VLLM_PROMPT_BS_BUCKET_MAX = 8
    """
    assert parse_env_file(text, "x.env", {"FROM_HERE": "1", "OTHER": "2"}) == {
        "VLLM_PROMPT_BS_BUCKET_MAX": "8",
        "VLLM_BUCKETING_STRATEGY": "lin",
        "EMPTY": "",
        "QUOTED": "a # b",
        "FROM_HERE": "1",
        "URL": "http://x/#y",
    }
    with pytest.raises(BucketError, match=r"^x\.env:2: '- A=1' is not NAME=value"):
        parse_env_file("A=1\n- A=1\n", "x.env", {})


def test_the_command_writes_what_compile_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_environment(monkeypatch)
    command = ["buckets", "import", "--from-vllm-env", *FLAGS]
    assert main(command) == 0
    spec = capsys.readouterr().out.splitlines()[-1]
    expected = import_vllm({}, PLAIN, str).ladder
    assert parse_spec(spec) == expected
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", "lin")
    path = tmp_path / "buckets.toml"
    assert main([*command, "--explain", "-o", str(path)]) == 0
    output = capsys.readouterr().out
    assert "VLLM_BUCKETING_STRATEGY" in output
    assert "block table" in output
    assert "--max-num-seqs 16 --max-model-len 4096 --max-num-batched-tokens 2048" in path.read_text(encoding="utf-8")
    assert parse_spec(str(path)) == import_vllm({"VLLM_BUCKETING_STRATEGY": "lin"}, PLAIN, str).ladder
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert parse_spec(data["spec"]) == parse_spec(str(path))
    assert data["axes"]["PROMPT_QUERY"]["STEP"] == 128
    assert [variable["name"] for variable in data["variables"]] == ["VLLM_BUCKETING_STRATEGY"]


def test_a_file_of_variables_replaces_those_of_the_process_and_may_name_a_bucket_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_environment(monkeypatch)
    monkeypatch.setenv("VLLM_PROMPT_BS_BUCKET_MIM", "of this process")
    (tmp_path / "b.txt").write_text("(1, [256, 512], [0, 8])\n(16, 1, 256)\n")
    (tmp_path / "gaudi.env").write_text("VLLM_BUCKETING_FROM_FILE=b.txt\n")
    command = ["buckets", "import", "--from-vllm-env", *FLAGS]
    assert main([*command, "--env-file", str(tmp_path / "gaudi.env")]) == 0
    assert capsys.readouterr().out.splitlines() == ["prefill=[1]x[256,512],decode=[16]x[2048,4096]"]
    (tmp_path / "b.txt").unlink()
    assert main([*command, "--env-file", str(tmp_path / "gaudi.env")]) == 1
    assert "cannot read b.txt" in capsys.readouterr().err
    assert main(command) == 1
    assert "did you mean VLLM_PROMPT_BS_BUCKET_MIN?" in capsys.readouterr().err
    assert main(["buckets", "import", *FLAGS]) == 2
    assert "--from-vllm-env" in capsys.readouterr().err
