"""The machine between engine and text: what ends a continuation, what counts as a token, and how deltas add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.binding.events import Event
from llmc.runtime.context_limit import ContextLimit
from llmc.runtime.gathered import Gathered
from llmc.runtime.generation import Generation
from llmc.runtime.outputs import CompletionOutput, RequestFailure, TokenDelta, TokenLogprob
from llmc.runtime.params import SamplingParams

from support.server_harness import engine_event

EOS = 0
LIMIT = ContextLimit(tokens=64, model_tokens=64)


def decode(token_ids: Sequence[int]) -> str:
    """Two bytes a token: characters of one to three bytes, torn between tokens; EOS is special and has no text."""
    return b"".join(token.to_bytes(2, "big") for token in token_ids if token != EOS).decode(errors="replace")


def tokens_of(text: str) -> list[int]:
    data = text.encode()
    data += b" " * (len(data) % 2)
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


def token(token_id: int, **fields: Any) -> Event:
    return engine_event("token", token_id=token_id, logprob=-0.5, rank=1, **fields)


def end(reason: str, token_id: int = -1, **fields: Any) -> Event:
    return engine_event("finished", finish_reason=reason, token_id=token_id, logprob=-0.25, rank=1, **fields)


def run(events: Sequence[Event], params: SamplingParams, limit: ContextLimit = LIMIT) -> Gathered:
    generation, gathered = Generation([7], params, decode, limit), Gathered(params)
    for event in events:
        generation.take(event)
    gathered.take_all(generation)
    assert gathered.num_tokens == generation.num_output_tokens
    return gathered


def one(text: str, last: Event, limit: ContextLimit = LIMIT, **params: Any) -> CompletionOutput:
    events = [*map(token, tokens_of(text)), last]
    (output,) = run(events, SamplingParams(max_tokens=50, logprobs=0, **params), limit).outputs
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    return output


def test_a_sampled_eos_is_a_token_without_text() -> None:
    output = one("abcd", end("stop", EOS))
    assert (output.text, output.finish_reason, output.stop_reason) == ("abcd", "stop", None)
    assert output.token_ids == (*tokens_of("abcd"), EOS)
    assert output.logprobs is not None
    assert output.logprobs[-1].logprob == -0.25


def test_an_eos_alone() -> None:
    output = one("", end("stop", EOS))
    assert (output.text, output.token_ids, output.finish_reason) == ("", (EOS,), "stop")


def test_a_stop_token_is_told_and_left_out() -> None:
    (stop,) = tokens_of("zz")
    output = one("abcd", end("stop", stop), stop_token_ids=[stop])
    assert (output.text, output.stop_reason, output.token_ids[-1]) == ("abcd", stop, stop)
    shown = one("abcd", end("stop", stop), stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == "abcdzz"
    # Not by a token that is no stop token of the request: that is an eos.
    assert one("abcd", end("stop", stop), stop_token_ids=[stop + 1]).stop_reason is None


def test_a_stop_string_is_not_looked_for_in_the_token_that_ends() -> None:
    (stop,) = tokens_of("zz")
    for shown in (False, True):
        output = one("abcd", end("stop", stop), stop=["dz"], stop_token_ids=[stop], include_stop_str_in_output=shown)
        assert (output.stop_reason, output.text) == (stop, "abcdzz" if shown else "abcd")


def test_a_stop_string_ends_the_text_and_not_its_tokens() -> None:
    for shown, text in ((False, "ab"), (True, "abcde")):
        output = one("abcdef", end("length"), stop=["cde"], include_stop_str_in_output=shown)
        assert (output.text, output.stop_reason, output.finish_reason) == (text, "cde", "stop")
        assert output.token_ids == tuple(tokens_of("abcdef"))


def test_the_limit_that_ended_a_request_is_named() -> None:
    pool = ContextLimit(tokens=3, model_tokens=64, kv_bytes=4096)
    output = one("abcd", end("length"), pool)
    assert output.finish_reason == "length"
    assert output.finish_detail is not None
    assert "fill the 3 tokens that the KV pool holds, fewer than the model's 64" in output.finish_detail
    context = one("abcd", end("length"), ContextLimit(tokens=3, model_tokens=3)).finish_detail
    assert context == "prompt and output fill the model's context of 3 tokens: shorten the prompt"
    assert one("abcd", end("length")).finish_detail is None
    assert one("abcd", end("stop", EOS), pool).finish_detail is None


def test_an_error_comes_in_a_delta_of_its_own() -> None:
    params = SamplingParams(n=2, max_tokens=9)
    generation = Generation([7], params, decode)
    generation.take(token(tokens_of("ab")[0]))
    generation.take(engine_event("failed", finish_reason="error", error_code=11, error_message="It broke."))
    deltas = []
    while (delta := generation.next_delta()) is not None:
        deltas.append(delta)
    assert [(d.output_index, d.text, d.finish_reason) for d in deltas] == [
        (0, "ab", None),
        (0, "", "error"),
        (1, "", "error"),
    ]
    failure = RequestFailure("internal", "the request failed after 1 prompt and 1 output tokens: It broke.")
    assert [d.error for d in deltas] == [None, failure, failure]


def test_a_decoder_that_raises_fails_the_request() -> None:
    def broken(token_ids: Sequence[int]) -> str:
        if 9 in token_ids:
            raise ValueError("no such token")
        return decode(token_ids)

    generation = Generation([7], SamplingParams(max_tokens=9), broken)
    generation.take(token(9))
    assert generation.done
    assert generation.failure is not None
    assert generation.failure.message == "the answer cannot be turned into text: no such token"


texts = st.text(alphabet="abé世 ", max_size=24)


@given(
    texts,
    st.lists(st.text(alphabet="abé世 ", min_size=1, max_size=3), max_size=2),
    st.sampled_from(["eos", "stop", "length"]),
    st.lists(st.booleans(), max_size=30),
    st.booleans(),
    st.integers(0, 6),
)
def test_when_somebody_looks_changes_nothing(
    text: str, stops: list[str], how: str, looks: list[bool], shown: bool, min_tokens: int
) -> None:
    """Deltas add up to the same, however many were merged; only whole characters are told, and none twice."""
    ids = tokens_of(text)
    stop_id = tokens_of("##")[0]
    last = {"eos": end("stop", EOS), "stop": end("stop", stop_id), "length": end("length")}[how]
    params = SamplingParams(
        max_tokens=50,
        min_tokens=min_tokens,
        stop=stops,
        stop_token_ids=[stop_id],
        logprobs=0,
        include_stop_str_in_output=shown,
    )
    whole = run([*map(token, ids), last], params)
    generation, pieces, reasons = Generation([7], params, decode, LIMIT), Gathered(params), []
    for number, event in enumerate([*map(token, ids), last]):
        generation.take(event)
        while number < len(looks) and looks[number] and (delta := generation.next_delta()) is not None:
            pieces.add(delta)
            reasons.append(delta.finish_reason)
            assert "\ufffd" not in delta.text
    while (delta := generation.next_delta()) is not None:
        pieces.add(delta)
        reasons.append(delta.finish_reason)
    assert pieces.outputs == whole.outputs
    assert [reason for reason in reasons if reason] == [whole.outputs[0].finish_reason]
    (output,) = whole.outputs
    if isinstance(output.stop_reason, str):
        assert output.stop_reason in stops
        assert output.text.endswith(output.stop_reason) == (shown or output.text.endswith(output.stop_reason))
    else:
        sampled = [*ids, *([] if how == "length" else [last.token_id])]
        assert list(output.token_ids) == sampled
        assert output.text == decode(ids) + ("##" if how == "stop" and shown else "")


@given(st.data())
def test_what_is_gathered_keeps_every_bit(data: st.DataObject) -> None:
    """Deltas in any mixture of continuations, with logprobs that are whatever a float may be."""
    number = st.floats(allow_nan=False)
    n = data.draw(st.integers(1, 3))
    gathered = Gathered(SamplingParams(n=n, max_tokens=50, logprobs=2))
    expected: list[list[TokenLogprob]] = [[] for _ in range(n)]
    for which in data.draw(st.lists(st.integers(0, n - 1), max_size=12)):
        entry = st.builds(
            TokenLogprob,
            st.integers(0, 2**31 - 1),
            number,
            st.dictionaries(st.integers(0, 2**31 - 1), number, max_size=3),
            st.integers(0, 2**31),
        )
        entries = tuple(data.draw(st.lists(entry, max_size=3)))
        expected[which] += entries
        ids = tuple(one.token_id for one in entries)
        gathered.add(TokenDelta(index=0, output_index=which, text="x", token_ids=ids, logprobs=entries))
    end = data.draw(st.integers(0, n - 1))
    gathered.add(TokenDelta(index=0, output_index=end, text="", token_ids=(), finish_reason="length"))
    assert [list(output.logprobs or ()) for output in gathered.outputs] == expected
    assert [list(output.token_ids) for output in gathered.outputs] == [[e.token_id for e in one] for one in expected]
    assert gathered.num_tokens == sum(map(len, expected))
    reasons = ["length" if which == end else "error" for which in range(n)]
    assert [output.finish_reason for output in gathered.outputs] == reasons
