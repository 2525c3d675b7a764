"""What callers give as prompts: texts, token ids or conversations, one or many; and the check of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from llmc.shown import shown

from .context_limit import ContextLimit
from .request_error import RequestError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = "str | Sequence[int] | Messages | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"
"""A text, token ids or a conversation, or a list of these. Token ids may be an array or a tensor. A prompt may also be
an object: {"prompt": text, "images": [image, …]}, {"prompt_token_ids": […]} or {"messages": […], "tools": […]}."""
_GIVEN = ("prompt", "prompt_token_ids", "messages")
_BESIDE = {"prompt": "images", "messages": "tools"}


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt, told apart. given: a text, token ids, or the messages of a conversation, as `is_chat` says. images:
    those of a text; a conversation has its own in its messages. tools: of a conversation; None for those of all."""

    given: Any
    is_chat: bool
    images: Sequence[Any] = ()
    tools: Sequence[Mapping[str, Any]] | None = None


def given_prompt(index: int, item: Any) -> GivenPrompt:
    """Prompt `index`, in whichever form it is. Raises RequestError for an object of another form."""
    if not isinstance(item, Mapping):
        return GivenPrompt(item, is_chat(item))
    named = [name for name in _GIVEN if item.get(name) is not None]
    if len(named) != 1:
        raise RequestError(f"prompt {index} has {len(named)} prompts: give exactly one of {', '.join(_GIVEN)}")
    (name,) = named
    for key, value in item.items():
        if key not in (name, _BESIDE.get(name)) and value is not None:
            raise RequestError(f"prompt {index} has {key!r} beside {name}: {_hint(key)}")
    images = item.get("images") or () if name == "prompt" else ()
    if not isinstance(images, (list, tuple)):
        raise RequestError(f"prompt {index} has the images {shown(images)}: give a list of them")
    tools = item.get("tools") if name == "messages" else None
    return GivenPrompt(item[name], name == "messages", images, tools)


def _hint(key: Any) -> str:
    if key == "images":
        return "images go with a text, or into the messages"
    return f"the keys are {', '.join((*_GIVEN, *_BESIDE.values()))}"


def _is_object(item: Any) -> bool:
    """Whether it is a prompt as an object, and not a message."""
    return isinstance(item, Mapping) and any(name in item for name in _GIVEN)


def is_chat(item: Any) -> bool:
    """Whether a prompt is a conversation."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping)


def as_batch(prompts: Any) -> list[Any]:
    """The prompts as a list, from one or many. Raises RequestError."""
    if isinstance(prompts, str) or _is_object(prompts):
        return [prompts]
    items = _elements(prompts)
    if items is None:
        raise RequestError(f"the prompts are {prompts!r}: give a text, token ids or messages, or a list of these")
    one = bool(items) and (_is_whole(items[0]) or (isinstance(items[0], Mapping) and not _is_object(items[0])))
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
