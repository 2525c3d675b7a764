"""The content of trace lines, and its validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from .bucket import MAX_DIM
from .trace_text import TraceError

_INT64 = -(1 << 63)
DEFAULT_PREFIX_BLOCK = 512


class Request(NamedTuple):
    """One line of a trace: seconds, tokens, and ids of the prompt's leading blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


class Columns(NamedTuple):
    """Several valid lines of a trace, with fields as in Request, and the number of prefix_ids of each."""

    arrival_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    prefix_counts: Sequence[int]
    prefix_ids: Sequence[int]


def checked(path: Path, line: int, arrival_s: Any, prompt: Any, output: Any, prefix: Any = ()) -> Request:
    """Validates the values of one line. Raises TraceError naming file and line."""
    if (
        (type(arrival_s) is float or type(arrival_s) is int)
        and -1e15 < arrival_s < 1e15
        and type(prompt) is type(output) is int
        and 1 <= prompt <= MAX_DIM
        and 0 <= output <= MAX_DIM
        and (prefix == () or (type(prefix) is list and all(type(n) is int and _INT64 <= n < -_INT64 for n in prefix)))
    ):
        return Request(float(arrival_s), prompt, output, tuple(prefix) if prefix else ())
    raise TraceError(f"{path}:{line}: {_complaint(arrival_s, prompt, output, prefix)}")


def checked_columns(
    arrival_s: Sequence[Any], prompts: Sequence[Any], outputs: Sequence[Any], prefixes: Sequence[Any] = ()
) -> Columns | None:
    """As `checked`, for many lines at once; None if a value is invalid. prefixes: per line a list or (); or () for
    all."""
    ids: list[Any] = list(chain.from_iterable(prefixes)) if set(map(type, prefixes)) <= {list, tuple} else [None]
    if (
        set(map(type, arrival_s)) <= {float, int}
        and set(map(type, prompts)) | set(map(type, outputs)) | set(map(type, ids)) <= {int}
        and (min(arrival_s) > -1e15 and max(arrival_s) < 1e15 and not math.isnan(sum(arrival_s)))
        and (min(prompts) >= 1 and max(prompts) <= MAX_DIM and min(outputs) >= 0 and max(outputs) <= MAX_DIM)
        and (not ids or (min(ids) >= _INT64 and max(ids) < -_INT64))
    ):
        return Columns(arrival_s, prompts, outputs, list(map(len, prefixes)) or [0] * len(prompts), ids)
    return None


def _complaint(arrival_s: object, prompt: object, output: object, prefix: object) -> str:
    seconds = arrival_s if isinstance(arrival_s, (int, float)) and not isinstance(arrival_s, bool) else math.nan
    if not abs(seconds) < 1e15:
        return f"arrival time {repr(arrival_s)[:40]} is not a number of seconds"
    for name, value, least in (("prompt", prompt, 1), ("output", output, 0)):
        if type(value) is not int or not least <= value <= MAX_DIM:
            return f"{name} length {str(value)[:40]!r} is not a whole number from {least} to {MAX_DIM}"
    if not isinstance(prefix, list):
        return f"prefix ids {str(prefix)[:40]!r} are not a list of whole numbers"
    wrong = next(item for item in prefix if type(item) is not int or not _INT64 <= item < -_INT64)
    return f"prefix id {str(wrong)[:40]!r} is not a whole number of 64 bits"
