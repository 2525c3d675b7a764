"""Trace files: llmc's form, the published forms, and what is said of damaged ones."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import BucketError, trace_text
from llmc.buckets.demand import Demand, ServerModel, clip, demands, replay
from llmc.buckets.trace import Trace, collect, read_trace, write_trace
from llmc.buckets.trace_lines import Request
from llmc.buckets.trace_text import TraceError

from support.traces import TRACES

# Made up, in the form of the published files.
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.2224670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1300, "output_length": 490, "hash_ids": [0, 1, 5]}
{"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [9, 1]}
"""


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [374, 879, 396]
    assert trace.output_tokens.tolist() == [44, 55, 109]
    assert trace.arrival_s == pytest.approx([0, 1.541877, 4.314579])
    assert trace.cached_tokens().tolist() == [0, 0, 0]


def test_mooncake_and_its_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 1.5, 3.0]
    assert trace.prefix_of(1).tolist() == [0, 1, 5]
    # Two blocks of 512 of the second prompt were seen; the third starts with a new one, whatever follows.
    assert trace.cached_tokens().tolist() == [0, 1024, 0]


requests = st.builds(
    Request,
    arrival_s=st.floats(0, 1e6),
    prompt_tokens=st.integers(1, 10_000),
    output_tokens=st.integers(0, 1000),
    prefix_ids=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4).map(tuple),
)


@given(st.lists(requests, min_size=1, max_size=20))
def test_written_traces_read_back(tmp_path_factory: Any, given_requests: list[Request]) -> None:
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    trace = collect(path, given_requests)
    ordered = sorted(given_requests, key=lambda r: r.arrival_s)
    assert [tuple(trace.prefix_of(n).tolist()) for n in range(len(trace))] == [r.prefix_ids for r in ordered]
    assert trace.prompt_tokens.tolist() == [r.prompt_tokens for r in ordered]
    write_trace(path, trace)
    again = read_trace(path)
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "prefix_start", "prefix_ids"):
        assert np.array_equal(getattr(again, column), getattr(trace, column)), column


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ('{"llmc_trace": 1}\n', "no requests"),
        ('{"llmc_trace": 2}\n', "version 2"),
        ('{"llmc_trace": 1, "prefix_block": 0}\n', "prefix_block 0"),
        ("a,b\n", "no known form"),
        ('{"x": 1}\n', "no known form"),
        ("[1]\n", "no known form"),
        ("{\n", ":1: .* is not JSON"),
        (AZURE + "2023-11-16 18:15:50,1\n", ":5: .*2 columns"),
        (AZURE + "yesterday,1,1\n", ":5: 'yesterday' is not a date"),
        (AZURE + "2023-11-16 18:15:50,0,1\n", ":5: prompt length '0'"),
        (AZURE + "2023-11-16 18:15:50,1.5,1\n", ":5: prompt length"),
        (AZURE + "2023-11-16 18:15:50,1,99999999999999999999\n", ":5: output length"),
        (MOONCAKE + '{"timestamp": 1}\n', ":4: input_length is missing"),
        (MOONCAKE + '{"timestamp": "1", "input_length": 1, "output_length": 1}\n', ":4: arrival time '1'"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', ":4: arrival time nan"),
        (MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1}\n', ":4: prompt length 'True'"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "text": "hello"}\n',
            "unknown field 'text'",
        ),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}\n', "not a list"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}\n', "prefix id '1.5'"),
        (MOONCAKE + "nonsense\n", ":4: 'nonsense' is not JSON"),
        (MOONCAKE + "[]\n", ":4: .*not a JSON object"),
        (MOONCAKE + "x" * (1 << 20) + "y\n", ":4: the line is longer"),
    ],
)
def test_damaged_traces_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    "torn",
    [
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1},{"arrival_s":1\n"prompt_tokens":1,"output_tokens":1}\n',
        '{"arrival_s":1,"prompt_tokens":1\n"output_tokens":1}\n',
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}],[{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}\n',
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prefix_ids":[{}\n]}\n',
        '{"arrival_s":NaN,"prompt_tokens":1,"output_tokens":1}\n',
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prefix_ids":[true]}\n',
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prefix_ids":[9223372036854775808]}\n',
        '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prefix_ids":null}\n',
    ],
)
@pytest.mark.parametrize("before", [0, 3])
def test_lines_are_sound_one_by_one(tmp_path: Path, torn: str, before: int) -> None:
    """Lines are read many at a time; what they would mean together must not hide what each of them lacks."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"output_tokens": 1, "arrival_s": 0, "prompt_tokens": 1}\n' * (1 + before) + torn)
    with pytest.raises(TraceError, match=rf"t\.jsonl:{before + 2}: "):
        read_trace(path)


def test_azure_times_of_all_forms_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    plain = ["2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.03", "2024-02-29T00:00:00"]
    path.write_text(head + "".join(f"{time},5,6\n" for time in plain))
    by_columns = read_trace(path)
    path.write_text(head + "".join(f"{time}+00:00, 5,6\n" for time in plain))
    assert np.array_equal(by_columns.arrival_s, read_trace(path).arrival_s)
    path.write_text(head + "2023-11-16 18:17:03,5,6\n2023-13-16 18:17:03,5,6\n")
    with pytest.raises(TraceError, match=r"trace\.csv:3: '2023-13-16 18:17:03' is not a date and time"):
        read_trace(path)


@pytest.mark.parametrize("text", [
    '{"timestamp": 1, "input_length": 9, "output_length": 2, "hash_ids": [1, 2]}',
    '{"hash_ids": [1, 2], "timestamp": 1, "input_length": 9, "output_length": 2}',
    '{"timestamp": 1, "hash_ids": [], "input_length": 9, "output_length": 2}',
])  # fmt: skip
def test_prefixes_that_are_not_wanted_are_passed_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{text}\n" * 3)
    whole, lengths = read_trace(path), read_trace(path, prefixes=False)
    assert len(lengths.prefix_ids) == 0
    assert (len(lengths.prefix_of(2)), len(lengths)) == (0, 3)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(whole, name), getattr(lengths, name))
    path.write_text(text.replace("9", '"9"') + "\n")
    with pytest.raises(TraceError, match="prompt length '9'"):
        read_trace(path, prefixes=False)


def test_a_trace_of_many_batches(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [Request(n / 8, 1 + n % 7000, n % 900, (n, -n) if n % 3 else ()) for n in range(20_000)]
    write_trace(path, collect(path, rows))
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [row.prompt_tokens for row in rows]
    assert trace.prefix_of(19_999).tolist() == [19_999, -19_999]
    assert len(trace.prefix_ids) == sum(len(row.prefix_ids) for row in rows)


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 3}\n'])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "marked"])
@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_packed_marked_and_piped_traces(tmp_path: Path, text: str, mark: bytes, packed: bool, end: str) -> None:
    plain, path = tmp_path / "plain", tmp_path / "trace"
    plain.write_text(text)
    data = mark + (text.rstrip() + end).replace("\n", end or "\n").encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    assert_same_requests(read_trace(path), read_trace(plain))
    saved = os.dup(0)
    try:
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)
        piped = read_trace(Path("-"))
    finally:
        os.dup2(saved, 0)
        os.close(saved)
    assert piped.name == "stdin"
    assert_same_requests(piped, read_trace(plain))


def assert_same_requests(found: Trace, expected: Trace) -> None:
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "prefix_start", "prefix_ids"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_damaged_and_swollen_gzip_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(MOONCAKE.encode())
    for damaged in (whole[:-9], whole[:12] + bytes([whole[12] ^ 0xFF]) + whole[13:], whole[:-5] + bytes(5)):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"damaged gzip file: .*; pack it again"):
            read_trace(path)
    # A kilobyte that unpacks to one line of a megabyte and more is looked at for no longer than that.
    path.write_bytes(gzip.compress(bytes(1 << 24).replace(b"\0", b" ")))
    with pytest.raises(TraceError, match=":1: the line is longer than 1048576 characters"):
        read_trace(path)
    path.write_bytes(gzip.compress(MOONCAKE.encode() * 20_000))
    assert len(read_trace(path)) == 60_000
    monkeypatch.setattr(trace_text, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(TraceError, match="unpacks to more than 1048576 bytes: cut it"):
        read_trace(path)


def test_missing_and_binary_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(tmp_path / "b")


pieces = st.sampled_from(
    [
        *(AZURE, MOONCAKE, '{"llmc_trace": 1}\n', '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}\n'),
        *("{", "}", ":", ",", "\n", '"arrival_s"', "1e999", "-1"),
    ]
)


@given(st.lists(pieces, max_size=8).map("".join))
def test_any_text_is_a_trace_or_a_bucket_error(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_text(text)
    try:
        trace = read_trace(path)
    except BucketError:
        return
    assert len(trace) >= 1
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.prompt_tokens.min() >= 1


@pytest.mark.parametrize(
    ("name", "count", "mean_prompt"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 19366, 1154.7),
        ("mooncake-fast25/conversation_trace.jsonl", 12031, 12035.1),
    ],
)
def test_published_traces(name: str, count: int, mean_prompt: float) -> None:
    if not (TRACES / name).is_file():
        pytest.skip("the trace is not on this machine; LLMC_TEST_TRACES names its folder")
    trace = read_trace(TRACES / name)
    assert len(trace) == count
    assert trace.prompt_tokens.mean() == pytest.approx(mean_prompt, abs=0.1)


# ---- demand --------------------------------------------------------------------------------------------------------


def trace_of(rows: list[tuple[float, int, int]]) -> Trace:
    return collect(Path("made-up"), [Request(*row) for row in rows])


def as_counts(demand: Demand) -> dict[tuple[int, int], float]:
    return dict(zip(zip(demand.batch.tolist(), demand.seq.tolist(), strict=True), demand.weight.tolist(), strict=True))


def test_one_request_alone() -> None:
    asked = demands(trace_of([(0.0, 10, 4)]), ServerModel(max_model_len=64), ("prefill", "decode"))
    assert as_counts(asked["prefill"]) == {(1, 10): 1}
    # The first token comes out of prefill; the other three decode at contexts 11, 12, 13.
    assert as_counts(asked["decode"]) == {(1, 11): 1, (1, 12): 1, (1, 13): 1}


def test_two_requests_decode_together_at_the_longer_context() -> None:
    asked = demands(trace_of([(0.0, 10, 4), (0.0, 20, 3)]), ServerModel(max_model_len=64), ("decode",))
    # One decode step of the first alone between the prefills, as the engine alternates.
    assert as_counts(asked["decode"]) == {(1, 11): 1, (2, 21): 1, (2, 22): 1}


def test_long_prompts_are_chunked_and_clipped() -> None:
    server = ServerModel(max_model_len=100, max_prefill_tokens=32)
    asked = demands(trace_of([(0.0, 70, 1), (1.0, 500, 9)]), server, ("prefill",))
    assert as_counts(asked["prefill"]) == {(1, 32): 5, (1, 4): 1, (1, 6): 1}


def test_prefills_batch_within_the_budget() -> None:
    server = ServerModel(max_model_len=64, max_prefill_batch=4, max_prefill_tokens=40)
    asked = demands(trace_of([(0.0, 10, 1)] * 4 + [(0.0, 30, 1)]), server, ("prefill",))
    assert as_counts(asked["prefill"]) == {(4, 10): 1, (1, 30): 1}


def test_prefix_cache_leaves_the_suffix() -> None:
    rows = [Request(0.0, 1200, 1, (1, 2)), Request(1.0, 1100, 1, (1, 2)), Request(2.0, 1024, 1, (1, 2))]
    asked = demands(collect(Path("x"), rows), ServerModel(prefix_cache=True), ("prefill",))
    assert as_counts(asked["prefill"]) == {(1, 1200): 1, (1, 76): 1, (1, 1): 1}


def test_nothing_to_decode_is_one_sentence() -> None:
    with pytest.raises(BucketError, match="no request that decodes"):
        demands(trace_of([(0.0, 5, 1)]), ServerModel(), ("decode",))


rows = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 300), st.integers(0, 60)), min_size=1, max_size=40)


@given(rows, st.integers(1, 8), st.integers(1, 4), st.sampled_from([0, 16, 100, 1000]))
def test_replay_serves_every_token_once(
    given_rows: list[tuple[float, int, int]], max_num_seqs: int, max_prefill_batch: int, max_prefill_tokens: int
) -> None:
    server = ServerModel(256, max_num_seqs, max_prefill_batch, max_prefill_tokens)
    trace = trace_of(given_rows)
    prompt, context, decodes = clip(trace, server)
    run = replay(trace.arrival_s, prompt, context, decodes, server)
    assert sum(batch * steps for batch, _, steps, _ in run.decode) == decodes.sum()
    assert all(1 <= batch <= max_num_seqs for batch, *_ in run.decode)
    assert all(first + steps - 1 <= 256 for _, first, steps, _ in run.decode)
    # Each decode step of a request reads a token more.
    read = sum(int(c) * int(n) + int(n) * (int(n) + 1) // 2 for c, n in zip(context, decodes, strict=True))
    found = sum(total * steps + batch * steps * (steps - 1) // 2 for batch, _, steps, total in run.decode)
    assert found == read
    assert all(first <= total <= batch * first for batch, first, _, total in run.decode)
    assert all(batch <= min(max_prefill_batch, max_num_seqs) for batch, _ in run.prefill)
    assert all(length <= server.max_chunk for _, length in run.prefill)
    assert sum(batch * length for batch, length in run.prefill) >= prompt.sum()
    if max_prefill_batch == 1:
        assert sum(length for _, length in run.prefill) == prompt.sum()
        exact = demands(trace, server, ("prefill",))["prefill"]
        assert sorted(run.prefill) == sorted(
            shape for shape, count in as_counts(exact).items() for _ in range(int(count))
        )


def test_a_trace_line_is_lengths_and_times_only(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", trace_of([(0.5, 3, 2)]))
    header, row = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(header) == {"llmc_trace": 1, "prefix_block": 512}
    assert json.loads(row) == {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 2}
