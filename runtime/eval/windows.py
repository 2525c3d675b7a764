"""Splits a text into the token windows that measurements predict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer

DEFAULT_WINDOW = 512


def windows(tokens: Sequence[int], length: int, most: int | None) -> list[list[int]]:
    """Splits `tokens` into windows of `length`, the last possibly shorter, using at most `most` tokens (None: all)."""
    kept = list(tokens if most is None else tokens[:most])
    cut = [kept[start : start + length] for start in range(0, len(kept), length)]
    return [window for window in cut if len(window) > 1]


def text_windows(tokenizer: Tokenizer, text: str, length: int, most: int | None) -> list[list[int]]:
    """Windows of at most `length` tokens, each starting with the BOS if the tokenizer adds one.

    Raises RequestError for a text, or a length, that leaves nothing to predict.
    """
    first = tokenizer.encode("")
    if length < len(first) + 2:
        raise RequestError(f"a window of {length} tokens predicts nothing; give at least {len(first) + 2}")
    found = windows(tokenizer.encode(text, add_special_tokens=False), length - len(first), most)
    if not found:
        raise RequestError("the text has fewer than 2 tokens, so there is nothing to predict; give a longer one")
    return [first + window for window in found]


def window_length(asked: int | None, max_tokens: int) -> int:
    """The window length for artifacts whose requests have at most `max_tokens`, one of which is generated.

    Raises RequestError if `asked` is too long.
    """
    if asked is None:
        return min(DEFAULT_WINDOW, max_tokens - 1)
    if asked >= max_tokens:
        raise RequestError(f"a window of {asked} tokens does not fit: the artifact holds {max_tokens - 1} at most")
    return asked


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """(mean, its standard error assuming independence); the error is 0 for a single value."""
    found = list(values)
    mean = math.fsum(found) / len(found)
    if len(found) < 2:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return mean, math.sqrt(variance / len(found))
