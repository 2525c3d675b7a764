"""Separates reasoning, such as <think>…</think>, from the answer, and delays guides until the reasoning ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.guided.shared_guides import Guide
from llmc.runtime.text.tokenizer import Tokenizer

from . import thoughts
from .text_machine import Step, TextMachine
from .thoughts import ThoughtParser

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningStyle:
    """How models mark their reasoning. always: it reasons even if neither prompt nor answer says so.

    parser: made with whether the answer starts inside the reasoning. open, close: tokens around the reasoning. label:
    text behind `open`. breaks: a token that ends the reasoning as well; a constrained answer must close it first.
    """

    name: str
    parser: Callable[[bool], TextMachine]
    always: bool = False
    open: str = OPEN
    close: str = CLOSE
    label: str = ""
    breaks: str = ""

    def is_hidden(self, tokenizer: Tokenizer) -> bool:
        """Whether decoding leaves the markers out."""
        return tokenizer.special_token_id(self.close) is not None


# Distilled models keep the architecture of their base model; this token identifies them.
_DEEPSEEK_TOKEN = "<｜Assistant｜>"


def reasoning_style(tokenizer: Tokenizer) -> ReasoningStyle | None:
    """Reasoning style by the model's tokens and chat template; None if it does not reason."""
    if tokenizer.token_id(CLOSE) is not None and tokenizer.token_id(_DEEPSEEK_TOKEN) is not None:
        return STYLES["deepseek_r1"]
    for style in (STYLES["qwen3"], STYLES["gemma4"]):
        if tokenizer.token_id(style.close) is not None and style.close in tokenizer.chat_template_text:
            return style
    return None


def starts_in_reasoning(style: ReasoningStyle, prompt_end: str) -> bool:
    """Whether an answer starts inside the reasoning; prompt_end: the last characters of the prompt's text."""
    end = prompt_end.rstrip()
    if end.endswith(style.open + style.label):
        return True
    # A template told not to think closes the reasoning itself.
    return style.always and not end.endswith(style.close)


class ReasoningParser(TextMachine):
    """Returns reasoning up to </think>, then content, both without white space at the borders.

    inside: the text starts with reasoning, whether or not <think> is written. Otherwise only a <think> at the very
    start opens it. Text without end of reasoning is all reasoning.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        super().__init__()

    def _run(self) -> Step[None]:
        yield from self._space()
        opened = yield from self._literal(OPEN)
        if opened or self._inside:
            yield from self._space()
            self._commit()
            if not (yield from self._until((CLOSE,), self._reasoning)):
                self._buffer = ""
            yield from self._space()
            self._commit()
        yield from self._rest()


STYLES: Mapping[str, ReasoningStyle] = {
    style.name: style
    for style in (
        ReasoningStyle("qwen3", ReasoningParser),
        ReasoningStyle("deepseek_r1", ReasoningParser, always=True),
        ReasoningStyle(
            "gemma4",
            ThoughtParser,
            open=thoughts.OPEN,
            close=thoughts.CLOSE,
            label=thoughts.LABEL,
            breaks=thoughts.CALL,
        ),
    )
}


class GuideAfterReasoning:
    """A guide that allows every token but `never` until the one that ends the reasoning.

    inside: the text starts with reasoning. Otherwise the first token is the one that opens reasoning, or one that the
    inner guide allows.
    """

    def __init__(
        self,
        guide: Guide,
        vocab_size: int,
        open_id: int | None,
        close_id: int,
        inside: bool,
        never: int | None = None,
    ) -> None:
        self._guide = guide
        self._open_id, self._close_id = open_id, close_id
        self._reasoning, self._first = inside, not inside
        self._all = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        if never is not None:
            self._all[never // 32] &= ~np.uint32(1 << never % 32)

    @property
    def finished(self) -> bool:
        """The text is complete: no token but eos may follow."""
        return not self._reasoning and self._guide.finished

    def mask(self) -> npt.NDArray[np.uint32]:
        """Words over the vocabulary, bit t % 32 of word t // 32 set when token t is allowed."""
        if self._reasoning:
            return self._all
        mask = self._guide.mask()
        if not self._first or self._open_id is None:
            return mask
        words = np.zeros_like(self._all)
        words[: mask.size] = mask
        words[self._open_id // 32] |= np.uint32(1 << self._open_id % 32)
        return words

    def forced(self) -> list[int]:
        """Tokens that must come next because the text allows no choice; none while reasoning is possible."""
        return [] if self._reasoning or self._first else self._guide.forced()

    def copy(self) -> GuideAfterReasoning:
        """An independent guide of the same text so far."""
        other = copy.copy(self)
        other._guide = self._guide.copy()
        return other

    def accept(self, token_id: int) -> None:
        """Advances past a sampled token."""
        first, self._first = self._first, False
        if self._reasoning:
            self._reasoning = token_id != self._close_id
        elif first and token_id == self._open_id:
            self._reasoning = True
        else:
            self._guide.accept(token_id)


def after_reasoning(
    make: Callable[[], Guide],
    vocab_size: int,
    open_id: int | None,
    close_id: int | None,
    inside: bool,
    never: int | None = None,
) -> Callable[[], Guide]:
    """`make` for a model that reasons first. Without a token that ends the reasoning, the guide applies from the
    start."""
    if close_id is None:
        return make
    end = close_id
    return lambda: GuideAfterReasoning(make(), vocab_size, open_id, end, inside, never)
