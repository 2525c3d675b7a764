"""Which modules a checkpoint's settings mean: exact names, regular expressions, parts of a path with wildcards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_MOST_CHARACTERS = 2000
_MOST_LOOPS = 6
"""Loops of a regular expression; a name is walked once more for each."""


@lru_cache(maxsize=4096)
def expression(pattern: str, origin: str) -> re.Pattern[str]:
    """A regular expression from a file, if a name is sure to be matched soon. Raises QuantizeError."""
    why = "it is no regular expression"
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, ValueError):
        compiled = None
    if compiled is not None:
        why = "" if len(pattern) <= _MOST_CHARACTERS else f"it has {len(pattern)} characters"
        why = why or _slow(pattern)
    if compiled is None or why:
        raise QuantizeError(f"{origin}: the pattern {shown(pattern)} is refused: {why}; name the modules themselves")
    return compiled


def _slow(pattern: str) -> str:
    """Why matching may take time exponential in a name's length, or of a high power of it; empty if it may not.

    Conservative: a loop over a group that holds a loop or a choice counts as one that may.
    """
    loops = i = 0
    holds = [False]  # for each open group: whether it holds a loop or a choice
    closed = False  # whether the item before is a group that does
    while i < len(pattern):
        character = pattern[i]
        if character == "\\":
            if pattern[i + 1 : i + 2].isdigit():
                return "it refers back to a group"
            i, closed = i + 2, False
            continue
        if character == "[":
            end = pattern.find("]", i + 2 + (pattern[i + 1 : i + 2] == "^"))
            while end > 0 and pattern[end - 1] == "\\":
                end = pattern.find("]", end + 1)
            i, closed = (end if end > 0 else len(pattern)) + 1, False
            continue
        if character in "*+{":
            if closed:
                return "a repeated group holds a repetition or a choice"
            loops += 1
            holds[-1] = True
        elif character == "|":
            holds[-1], closed = True, False
        elif character == "(":
            holds.append(False)
            closed = False
            if pattern[i + 1 : i + 2] == "?":
                i += 1  # not a repetition
        elif character == ")":
            inner = holds.pop() if len(holds) > 1 else False
            closed = inner
            holds[-1] |= inner
        elif character != "?":
            closed = False
        i += 1
    return f"it has {loops} repetitions, more than {_MOST_LOOPS}" if loops > _MOST_LOOPS else ""


def matches(name: str, pattern: str, origin: str) -> bool:
    """Whether a module is meant by its exact name, or by a regular expression behind `re:`, from the name's start."""
    if pattern.startswith("re:"):
        return expression(pattern.removeprefix("re:"), origin).match(name) is not None
    return name == pattern


class Parts:
    """Modules that lie under one of some paths: `lm_head`, `mlp.gate`, `model.layers.0`, `*.attn.*`, `layers.1*`.

    A path is whole components of a module's name, wherever in it; `*` stands for anything.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        plain, starred = set(), []
        for path in dict.fromkeys(paths):
            path = path.removesuffix(".")
            if "*" in path:
                starred.append(_starred(path))
            elif path:
                plain.add(path)
        self._plain = frozenset(plain)
        self._starred = starred

    def find(self, name: str) -> bool:
        """Whether the module `name` is one of them."""
        return any(part in self._plain for part in _parts(name)) or any(_holds(name, path) for path in self._starred)


def _parts(name: str) -> Iterable[str]:
    """Every run of components of a module's name."""
    components = name.split(".")
    for first in range(len(components)):
        for last in range(first + 1, len(components) + 1):
            yield ".".join(components[first:last])


def _starred(path: str) -> tuple[str, ...]:
    """The pieces between the stars; an outer one ends at a component's border unless it ends at a star."""
    pieces = path.split("*")
    first, last = pieces[0], pieces[-1]
    pieces[0] = f".{first}" if first and not first.startswith(".") else first
    pieces[-1] = f"{last}." if last and not last.endswith(".") else last
    return tuple(piece for piece in pieces if piece)


def _holds(name: str, pieces: tuple[str, ...]) -> bool:
    """Whether the pieces are in the name, one behind the other: found greedily, for stars stand for anything."""
    text, at = f".{name}.", 0
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
