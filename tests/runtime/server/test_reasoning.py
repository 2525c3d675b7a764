"""Reasoning and answer told apart however the text is cut, and guides that hold from the end of the reasoning on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.guided.shared_guides import Guide, SharedGuides
from llmc.runtime.server.chat_output import ChatDelta
from llmc.runtime.server.reasoning import (
    STYLES,
    GuideAfterReasoning,
    ReasoningParser,
    after_reasoning,
    starts_in_reasoning,
)
from llmc.runtime.server.tools.hermes import HermesParser
from llmc.runtime.server.tools.output import ChatOutputParser

from support.told_answers import cut

CASES = [
    # (starts inside, text, reasoning, content)
    (False, "Hello", "", "Hello"),
    (False, " \n Hello \n", "", " \n Hello \n"),
    (False, "<think>\nHm, 1 < 2.\n</think>\n\nTwo.", "Hm, 1 < 2.", "Two."),
    (False, "<think></think>Two.", "", "Two."),
    (False, "<think>\n\n</think>\n\nTwo.\n", "", "Two.\n"),
    (False, "No <think>x</think>", "", "No <think>x</think>"),
    (False, "<think>first</think>a <think>b</think> c", "first", "a <think>b</think> c"),
    (False, "<thin", "", "<thin"),
    (False, "<think>never ends </thi", "never ends", ""),
    (False, "<think>a <think> b</think>c", "a <think> b", "c"),
    (True, "Hm.\n</think>\n\nTwo.", "Hm.", "Two."),
    (True, "<think>\nHm.</think>Two.", "Hm.", "Two."),
    (True, "never ends\n", "never ends", ""),
    (True, "", "", ""),
    (True, "</think>", "", ""),
]


def parse(inside: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(inside)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    reasoned = [bool(delta.reasoning_content) for delta in deltas]
    assert reasoned == sorted(reasoned, reverse=True), "reasoning comes before the answer"
    return "".join(delta.reasoning_content for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content(inside: bool, text: str, reasoning: str, content: str) -> None:
    assert parse(inside, [text]) == (reasoning, content)
    assert parse(inside, list(text)) == (reasoning, content)


@settings(max_examples=300)
@given(case=st.sampled_from(CASES), borders=st.lists(st.integers(0, 60), max_size=8))
def test_cuts_do_not_matter(case: tuple[bool, str, str, str], borders: list[int]) -> None:
    inside, text, reasoning, content = case
    assert parse(inside, cut(text, borders)) == (reasoning, content)


@settings(max_examples=300)
@given(
    inside=st.booleans(),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é."]), max_size=14),
    borders=st.lists(st.integers(0, 60), max_size=8),
)
def test_any_text_is_read_alike_however_it_is_cut(inside: bool, pieces: list[str], borders: list[int]) -> None:
    text = "".join(pieces)
    reasoning, content = parse(inside, [text])
    assert parse(inside, cut(text, borders)) == (reasoning, content)
    assert "</think>" not in reasoning
    if not inside and not text.lstrip().startswith("<think>"):
        assert (reasoning, content) == ("", text)


@given(
    reasoning=st.text("ab <>/\n", max_size=20),
    content=st.text("ab <>/\n", max_size=20),
    borders=st.lists(st.integers(0, 60), max_size=8),
)
def test_both_parts_survive(reasoning: str, content: str, borders: list[int]) -> None:
    text = f"<think>{reasoning}</think>{content}"
    assert parse(False, cut(text, borders)) == (reasoning.strip(), content.lstrip())


@pytest.mark.parametrize(
    ("style", "prompt_end", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
    ],
)
def test_where_an_answer_starts(style: str, prompt_end: str, inside: bool) -> None:
    assert starts_in_reasoning(STYLES[style], prompt_end) is inside


@given(borders=st.lists(st.integers(0, 120), max_size=8))
def test_reasoning_then_content_and_calls(borders: list[int]) -> None:
    text = '<think>I could <tool_call> it.</think>\n\nSo:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parser = ChatOutputParser(ReasoningParser(False), HermesParser({"f"}))
    deltas: list[ChatDelta] = []
    for piece in cut(text, borders):
        deltas += parser.push(piece)
    deltas += parser.finish()
    calls = [part["function"] for delta in deltas for part in delta.tool_calls]
    assert "".join(delta.reasoning_content for delta in deltas) == "I could <tool_call> it."
    assert "".join(delta.content for delta in deltas) == "So:"
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    assert calls[0]["name"] == "f"
    assert parser.called_tools


def test_a_function_that_the_client_chose_does_not_count_as_called() -> None:
    parser = ChatOutputParser(None, HermesParser({"f"}), count_calls=False)
    assert len(parser.push('<tool_call>{"name": "f"}</tool_call>')) > 0
    assert not parser.called_tools


VOCABULARY, OPEN, CLOSE = 100, 97, 98


class Digits:
    """Allows tokens 3, then 4; after that the text is complete."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.taken) == 2

    def mask(self) -> np.ndarray:
        return np.array([1 << (3 + len(self.taken))], np.uint32)

    def accept(self, token_id: int) -> None:
        assert token_id == 3 + len(self.taken)
        self.taken.append(token_id)

    def forced(self) -> list[int]:
        return [[3, 4], [4], []][len(self.taken)]

    def copy(self) -> Digits:
        other = Digits()
        other.taken = list(self.taken)
        return other


def allowed(guide: GuideAfterReasoning) -> list[int]:
    bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits) if token < VOCABULARY]


def test_guide_holds_after_the_reasoning() -> None:
    guide = after_reasoning(Digits, VOCABULARY, OPEN, CLOSE, True)()
    assert isinstance(guide, GuideAfterReasoning)
    for token in (7, OPEN, 3):
        assert allowed(guide) == list(range(VOCABULARY))
        guide.accept(token)
        assert not guide.finished
    guide.accept(CLOSE)
    assert allowed(guide) == [3]
    guide.accept(3)
    guide.accept(4)
    assert guide.finished


def test_guide_of_an_answer_that_may_reason() -> None:
    guide = GuideAfterReasoning(Digits(), VOCABULARY, OPEN, CLOSE, inside=False)
    assert allowed(guide) == [3, OPEN]
    guide.accept(OPEN)
    assert allowed(guide) == list(range(VOCABULARY))
    guide.accept(CLOSE)
    assert allowed(guide) == [3]
    plain = GuideAfterReasoning(Digits(), VOCABULARY, OPEN, CLOSE, inside=False)
    plain.accept(3)
    assert allowed(plain) == [4]


def test_a_token_that_breaks_the_reasoning_is_never_allowed_in_it() -> None:
    never = 40
    guide = after_reasoning(Digits, VOCABULARY, OPEN, CLOSE, True, never)()
    assert isinstance(guide, GuideAfterReasoning)
    assert allowed(guide) == [token for token in range(VOCABULARY) if token != never]
    guide.accept(CLOSE)
    assert allowed(guide) == [3]


def test_guesses_reach_from_the_reasoning_into_the_answer() -> None:
    guides = SharedGuides(after_reasoning(Digits, VOCABULARY, OPEN, CLOSE, True), 1)
    assert guides.ahead(0, [7, CLOSE, 3, 4], 8).guesses == [7, CLOSE, 3], "4 ends the text"
    assert guides.ahead(0, [7, CLOSE, 5], 8).guesses == [7, CLOSE, 3], "3 is forced"
    assert guides.ahead(0, [], 8).guesses == []


def test_without_a_token_for_the_end_the_guide_holds_from_the_start() -> None:
    make: Callable[[], Guide] = Digits
    assert after_reasoning(make, VOCABULARY, OPEN, None, True) is make
