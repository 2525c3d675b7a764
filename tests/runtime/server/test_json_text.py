"""Large answers in pieces: the text is the encoder's own, and no piece is large."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server import json_text
from llmc.runtime.server.json_text import pieces, to_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
)


@given(JSON, st.integers(0, 12))
def test_pieces_make_the_text(value: Any, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_NODES", most)
        assert b"".join(pieces(value)) == to_json(value)


def test_no_piece_of_a_large_answer_is_large() -> None:
    alternatives = [{"token": "the", "logprob": -1.5, "bytes": [116, 104, 101]}] * 20
    entries = [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": alternatives}] * 500
    answer = {
        "id": "x",
        "choices": [{"index": i, "logprobs": {"content": entries}} for i in range(8)],
        "ids": [1] * 99_999,
    }
    made = list(pieces(answer))
    assert b"".join(made) == to_json(answer)
    assert json.loads(b"".join(made)) == answer
    assert max(map(len, made)) < 20_000
    assert len(made) < 10_000


def test_numbers_that_json_lacks_are_errors() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json([float("nan")])
