"""JSON bodies: what they hold is counted truly, and what is too much is refused before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server.bodies import MAX_DEPTH, MAX_PARTS, MAX_VALUES, Size, parse, size_of
from llmc.runtime.server.errors import ApiError, as_api_error
from llmc.runtime.server.protocol.chat import ChatRequest
from llmc.runtime.server.protocol.common import MAX_LOGIT_BIASES
from llmc.runtime.server.protocol.completions import CompletionRequest, DetokenizeRequest

TEXTS = st.text(st.sampled_from('ab"\\[]{},:/\n\u0000é\U0001f600'))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def counted(value: Any) -> Size:
    """By walking through what the parser made."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return Size(0, 0, 1)
    sizes = [counted(one) for one in inner]
    keys = len(value) if isinstance(value, dict) else 0
    commas = max(0, len(inner) - 1) + sum(size.num_values - 1 for size in sizes)
    return Size(
        1 + max((size.depth for size in sizes), default=0),
        1 + keys + sum(size.num_parts for size in sizes),
        commas + 1,
    )


MESSAGE = {"role": "user", "content": "a"}


@given(JSON, st.booleans())
def test_sizes_are_those_that_a_parser_finds(value: Any, escaped: bool) -> None:
    assert size_of(json.dumps(value, ensure_ascii=escaped).encode()) == counted(value)


@given(st.binary())
def test_any_bytes_have_a_size(body: bytes) -> None:
    size_of(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt":[' + "1," * MAX_VALUES + "1]}", f"has {MAX_VALUES + 1} values: at most {MAX_VALUES}"),
        ('{"messages":[' + "{}," * MAX_PARTS + "{}]}", f"at most {MAX_PARTS} are read"),
        ('{"messages":' + "[" * 500 + "]" * 500 + "}", f"nests 501 deep: at most {MAX_DEPTH}"),
        ('{"messages":' + "[" * 2_000_000, "nests 2000001 deep"),
    ],
)
def test_too_much_is_refused_unparsed(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydantic_core, "from_json", None)
    with pytest.raises(ApiError, match=message):
        parse(CompletionRequest, body.encode())


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [MESSAGE], "tools": ["x"] * 1000}),
        (ChatRequest, {"messages": [MESSAGE], "guided_choice": [1] * 1000}),
        (ChatRequest, {"messages": [MESSAGE], "stop_token_ids": ["x"] * 1000}),
        (ChatRequest, {"messages": [MESSAGE], "logit_bias": dict.fromkeys(map(str, range(MAX_LOGIT_BIASES + 1)), "x")}),
        (DetokenizeRequest, {"tokens": ["x"] * 1000}),
    ],
)
def test_one_error_is_made_of_many(model: type, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestValidationError) as caught:
        parse(model, json.dumps(fields).encode())
    assert len(caught.value.errors()) == 1
    assert as_api_error(caught.value).param is not None


def test_what_is_large_and_allowed_is_parsed() -> None:
    ids = list(range(100_000))
    request = parse(CompletionRequest, json.dumps({"prompt": ids}).encode())
    assert isinstance(request, CompletionRequest)
    assert request.prompt == ids
    text = '"[{,:\\' * 100_000
    request = parse(CompletionRequest, json.dumps({"prompt": text}).encode())
    assert isinstance(request, CompletionRequest)
    assert request.prompt == text


def test_one_point_nothing_is_one() -> None:
    request = parse(CompletionRequest, b'{"prompt": [1.0, 2], "n": 2.0, "temperature": 1, "top_p": 1.0, "seed": 3e0}')
    assert isinstance(request, CompletionRequest)
    assert (request.prompt, request.n, request.seed, request.top_p) == ([1, 2], 2, 3, 1.0)
    assert type(request.n) is int
    for wrong in (b'{"prompt": [1.5]}', b'{"prompt": "a", "n": 1.5}', b'{"prompt": "a", "n": "1"}'):
        with pytest.raises(RequestValidationError):
            parse(CompletionRequest, wrong)
