"""Reasoning as Gemma 4 marks it, told apart however the text is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.server.reasoning import STYLES, starts_in_reasoning
from llmc.runtime.server.thoughts import ThoughtParser

from support.told_answers import cut, special_tokenizer

STYLE = STYLES["gemma4"]
CALL = "<|tool_call>call:f{}<tool_call|>"
CASES = [
    # (starts inside, text, reasoning, content)
    (False, "Hello", "", "Hello"),
    (False, " \n Hello \n", "", " \n Hello \n"),
    (False, "<|channel>thought\nHm, 1 < 2.\n<channel|>Two.", "Hm, 1 < 2.", "Two."),
    (False, "<|channel>thought\n<channel|>\nTwo.\n", "", "Two.\n"),
    (False, "<|channel>thought<channel|>Two.", "", "Two."),
    (False, "<|channel>thoughtful words<channel|>Two.", "thoughtful words", "Two."),
    (False, "<|channel>thought experiments<channel|>Two.", "thought experiments", "Two."),
    (True, "thought\nexperiments<channel|>Two.", "thought\nexperiments", "Two."),
    (False, "<|channel>no label<channel|>Two.", "no label", "Two."),
    (False, "<|channel><|channel>thought\na<channel|>b", "a", "b"),
    # Behind the answer, and in between.
    (False, "Two.<|channel>thought\n<channel|>", "", "Two."),
    (False, "Two.\n<channel|>", "", "Two.\n"),
    (False, "One. <|channel>thought\nhm<channel|>Two. <channel|>Three.", "hm", "One. Two. Three."),
    # Cut off.
    (False, "<|chan", "", "<|chan"),
    (False, "<|channel>thou", "", ""),
    (False, "<|channel>thought\nnever ends <chan", "never ends", ""),
    # The prompt began the thought.
    (True, "Hm.\n<channel|>Two.", "Hm.", "Two."),
    (True, "<|channel>thought\nHm.<channel|>Two.", "Hm.", "Two."),
    (True, "never ends\n", "never ends", ""),
    (True, "", "", ""),
    # A call ends a thought, and is content; a later parser reads it.
    (False, f"<|channel>thought\nI call.\n{CALL}", "I call.", CALL),
    (False, f"So: {CALL}<|channel>thought\nx<channel|>", "x", f"So: {CALL}"),
    (False, "<|tool_call>call:f{a:<|channel>x<channel|>", "", "<|tool_call>call:f{a:<|channel>x<channel|>"),
]


def parse(inside: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ThoughtParser(inside)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return "".join(delta.reasoning_content for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content(inside: bool, text: str, reasoning: str, content: str) -> None:
    assert parse(inside, [text]) == (reasoning, content)
    assert parse(inside, list(text)) == (reasoning, content)


PIECES = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "thought", "thought\n", "<", "<|", " ", "\n", "a"]


@settings(max_examples=500)
@given(
    inside=st.booleans(),
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    borders=st.lists(st.integers(0, 100), max_size=8),
)
def test_any_text_is_read_alike_however_it_is_cut(inside: bool, pieces: list[str], borders: list[int]) -> None:
    text = "".join(pieces)
    whole = parse(inside, [text])
    assert parse(inside, cut(text, borders)) == whole
    assert not any(marker in whole[0] for marker in PIECES[:3])
    if "<|tool_call>" not in text:
        assert not any(marker in whole[1] for marker in PIECES[:2]), "no markers leak"
    if not inside and not any(marker in text for marker in PIECES[:2]):
        assert whole == ("", text)


def test_reasoning_streams_as_it_comes() -> None:
    parser = ThoughtParser(False)
    told = [delta for char in "<|channel>thought\nlong" for delta in parser.push(char)]
    assert "".join(delta.reasoning_content for delta in told) == "long"
    assert all(len(delta.reasoning_content) == 1 for delta in told)


@pytest.mark.parametrize(
    ("prompt_end", "inside"),
    [
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
        ("<tool_response|><|channel>thought\n", True),
    ],
)
def test_where_an_answer_starts(prompt_end: str, inside: bool) -> None:
    assert starts_in_reasoning(STYLE, prompt_end) is inside


def test_markers_are_hidden_if_they_are_special_tokens(tmp_path: Path) -> None:
    assert STYLE.is_hidden(special_tokenizer(tmp_path, ["<|channel>", "<channel|>"]))
    assert not STYLES["qwen3"].is_hidden(special_tokenizer(tmp_path, []))
