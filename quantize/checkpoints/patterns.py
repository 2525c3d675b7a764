"""Module patterns in a checkpoint's settings: exact names, regular expressions, and path parts with wildcards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

_MOST_CHARACTERS = 2000
_MOST_LOOPS = 6
"""Most loops allowed in a regular expression; each multiplies the matching time by the name's length."""


@lru_cache(maxsize=4096)
def expression(pattern: str, origin: str) -> re.Pattern[str]:
    """Compiles a regular expression from a file. Raises QuantizeError if matching a name could take too long."""
    why = "it is not a regular expression"
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
    """Why matching could take exponential or high-order polynomial time in the name's length; empty if it cannot.

    Conservative: any loop over a group that contains a loop or an alternative is rejected.
    """
    loops = i = 0
    holds = [False]  # per open group: whether it contains a loop or an alternative
    closed = False  # whether the previous item is a group that does
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
    """Whether a pattern matches a module: by exact name, or by a regular expression after `re:`, anchored at the
    start."""
    if pattern.startswith("re:"):
        return expression(pattern.removeprefix("re:"), origin).match(name) is not None
    return name == pattern


class Parts:
    """Modules under one of several paths: `lm_head`, `mlp.gate`, `model.layers.0`, `*.attn.*`, `layers.1*`.

    A path matches whole components anywhere in a module's name; `*` matches any text.
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
        """Whether one of the paths matches module `name`."""
        return any(part in self._plain for part in _parts(name)) or any(_holds(name, path) for path in self._starred)


def _parts(name: str) -> Iterable[str]:
    """Every run of consecutive components of a module's name."""
    components = name.split(".")
    for first in range(len(components)):
        for last in range(first + 1, len(components) + 1):
            yield ".".join(components[first:last])


def _starred(path: str) -> tuple[str, ...]:
    """The pieces between stars. An outer piece must end at a component boundary unless a star is there."""
    pieces = path.split("*")
    first, last = pieces[0], pieces[-1]
    pieces[0] = f".{first}" if first and not first.startswith(".") else first
    pieces[-1] = f"{last}." if last and not last.endswith(".") else last
    return tuple(piece for piece in pieces if piece)


def _holds(name: str, pieces: tuple[str, ...]) -> bool:
    """Whether the pieces occur in the name in order. Greedy search suffices, because stars match anything."""
    text, at = f".{name}.", 0
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
