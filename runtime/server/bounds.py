"""Bounds of requests that depend on the served model: numbers of tokens, and valid token ids.

`check_bounds` enforces what `add_bounds` writes into the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from .async_engine import AsyncEngine
from .errors import ApiError
from .prompts import context_of
from .protocol.common import is_token_ids
from .refusals import CONTEXT

_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Fields whose items, also in nested lists, are token ids if they are numbers.
_IDS = {
    "prompt": "the prompt has token id",
    "input": "the input has token id",
    "tokens": "tokens has",
    "stop_token_ids": "stop_token_ids has",
}
_DIGITS = 10


def check_bounds(engine: AsyncEngine, body: BaseModel) -> None:
    """Raises ApiError for a field beyond the model's bounds."""
    most = engine.max_model_len - 1
    for name in _MAX_TOKENS:
        asked = _given(body, name)
        if asked is not None and asked > most:
            why = f"{context_of(engine)}, but {asked} of {name} were requested: ask for at most {most} ({CONTEXT})"
            raise ApiError(why, param=name, code=CONTEXT)
    for name, says in _IDS.items():
        wrong = next((token for ids in _lists(_given(body, name)) for token in _beyond(ids, engine.vocab_size)), None)
        if wrong is not None:
            why = f"{says} {wrong}: use whole numbers from 0 to {engine.vocab_size - 1}"
            raise ApiError(why, param=name, code="invalid_value")
    biases = _given(body, "logit_bias") or {}
    unknown = next((token for token in biases if int(token) >= engine.vocab_size), None)
    if unknown is not None:
        why = f"logit_bias has the key {unknown!r}: keys are token ids from 0 to {engine.vocab_size - 1}"
        raise ApiError(why, param="logit_bias", code="invalid_value")


def add_bounds(schemas: Mapping[str, Any], engine: AsyncEngine) -> None:
    """Adds the bounds to the request schemas."""
    for name, schema in schemas.items():
        if not name.endswith("Request"):
            continue
        for field, said in schema["properties"].items():
            forms = said.get("anyOf", [said])
            if field in _MAX_TOKENS:
                for form in forms:
                    if form.get("type") == "integer":
                        form.pop("exclusiveMaximum", None)
                        form["maximum"] = engine.max_model_len - 1
            elif field in _IDS:
                for form in forms:
                    for listed in (form, form.get("items", {})):
                        if listed.get("items", {}).get("type") == "integer":
                            listed["items"] = {"type": "integer", "minimum": 0, "maximum": engine.vocab_size - 1}
            elif field == "logit_bias":
                for form in forms:
                    if form.get("type") == "object":
                        form["propertyNames"] = {"pattern": digits_below(engine.vocab_size)}


def digits_below(limit: int) -> str:
    """A regular expression for integers below `limit`, in at most 10 digits."""
    last = str(limit - 1)
    forms = [f"[0-9]{{1,{len(last) - 1}}}"] if len(last) > 1 else []
    for place, digit in enumerate(last):
        if digit > "0":
            rest = len(last) - place - 1
            forms.append(f"{last[:place]}[0-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    zeros = f"0{{0,{_DIGITS - len(last)}}}"
    return f"^{zeros}({'|'.join([*forms, last])})$"


def _given(body: BaseModel, name: str) -> Any:
    return getattr(body, name) if name in type(body).model_fields else None


def _lists(value: Any) -> Iterator[Sequence[int]]:
    """The lists of token ids in a prompt, or the one that a field is."""
    if is_token_ids(value):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, list))


def _beyond(ids: Sequence[int], vocab_size: int) -> Iterator[int]:
    if min(ids) < 0 or max(ids) >= vocab_size:
        yield next(token for token in ids if not 0 <= token < vocab_size)
