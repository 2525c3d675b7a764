"""What callers give as prompts: texts, token ids or conversations, one or many; and the check of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from .context_limit import ContextLimit
from .request_error import RequestError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = "str | Sequence[int] | Messages"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"
"""A text, token ids or a conversation, or a list of these. Token ids may be an array or a tensor."""


def is_chat(item: Any) -> bool:
    """Whether a prompt is a conversation."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping)


def as_batch(prompts: Any) -> list[Any]:
    """The prompts as a list, from one or many. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    items = _elements(prompts)
    if items is None:
        raise RequestError(f"the prompts are {prompts!r}: give a text, token ids or messages, or a list of these")
    one = bool(items) and (_is_whole(items[0]) or isinstance(items[0], Mapping))
    return [items] if one else items


def checked_ids(index: int, ids: Any, vocab_size: int, limit: ContextLimit, most: int | None = None) -> list[int]:
    """The token ids of prompt `index`, of any type of whole numbers, as `int`; the first `most` of them. Raises
    RequestError."""
    where, given = f"prompt {index}", _elements(ids)
    if given is None:
        raise RequestError(f"{where} is {ids!r}: give a text, token ids or messages")
    found = []
    for token in given[:most]:
        if not _is_whole(token) or not 0 <= token < vocab_size:
            raise RequestError(f"{where} has token id {token!r}: use whole numbers from 0 to {vocab_size - 1}")
        found.append(int(token))
    if not found:
        raise RequestError(f"{where} has no tokens: give at least one")
    refusal = limit.refusal(len(found))
    if refusal is not None:
        raise RequestError(f"{where} has {refusal}")
    return found


def _elements(given: Any) -> list[Any] | None:
    """Those of a list, an array or a tensor; None for something else."""
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, bytearray, Mapping)):
        return None
    if not hasattr(given, "tolist"):
        return list(given)
    elements = given.tolist()
    return elements if isinstance(elements, list) else None


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
