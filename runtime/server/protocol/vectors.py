"""Requests of /v1/embeddings, /v1/rerank, /v1/score and /classify."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field
from typing_extensions import TypedDict

from .api_model import ApiModel
from .common import is_token_ids
from .completions import Prompt
from .shapes import Text, list_of, one_of, shaped, text_or_list, text_part

_INT32 = 2**31
MAX_DOCUMENTS = 1024
_MAX_PARTS = 64


def _not_zero(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("0 tokens of a text are none: give 1 or more, or -1 for as many as fit")
    return tokens


class VectorFields(ApiModel):
    """truncate_prompt_tokens: the most tokens of a text, which is cut at its end; -1: as many as fit. priority: lower
    runs first."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=_INT32), AfterValidator(_not_zero)] | None = Field(
        None, json_schema_extra={"not": {"const": 0}}
    )
    priority: int | None = Field(None, ge=-_INT32, lt=_INT32)
    user: str | None = None


class InputFields(VectorFields):
    """input: a text or token ids, or a list of one or the other."""

    input: Prompt

    @property
    def inputs(self) -> list[str | list[int]]:
        return [self.input] if isinstance(self.input, str) or is_token_ids(self.input) else list(self.input)


class EmbeddingRequest(InputFields):
    """dimensions: how many leading numbers of each vector to return."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=_INT32)


class ClassifyRequest(InputFields):
    """Texts whose labels are wanted."""


class TextItem(TypedDict):
    text: str


class ContentItem(TypedDict):
    content: Annotated[list[dict[str, Any]], shaped(list_of(text_part(), min_length=1, max_length=_MAX_PARTS))]


class ContentItems(TypedDict):
    content: Annotated[list[dict[str, Any]], shaped(list_of(text_part(), min_length=1, max_length=MAX_DOCUMENTS))]


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return "content" if "content" in value else "object"
    return text_or_list(value)


_HINT = 'a string, or an object with "text" or "content"'
_SHAPES = {"text": str, "object": TextItem, "content": ContentItem}
_ITEM = one_of(f"give {_HINT}", _kind, _SHAPES)
_LISTS = {"content": ContentItems, "list": list_of(_ITEM, min_length=1, max_length=MAX_DOCUMENTS)}
Item = Annotated[Any, shaped(_ITEM)]
Items = Annotated[Any, shaped(one_of(f"give {_HINT}, or a list of them", _kind, {**_SHAPES, **_LISTS}))]


def _text(item: Any) -> str:
    if isinstance(item, str):
        return item
    return item["text"] if "content" not in item else "\n".join(part["text"] for part in item["content"])


def _texts(items: Any) -> list[str]:
    """Each part of an object's content is a text of its own, as in vLLM."""
    if isinstance(items, dict) and "content" in items:
        return [part["text"] for part in items["content"]]
    return [_text(item) for item in (items if isinstance(items, list) else [items])]


class RerankRequest(VectorFields):
    """documents are sorted by how well they answer the query. top_n: how many of the best to return; 0: all.
    instruction: what the model is told to look for, where it takes that."""

    query: Item
    documents: Items
    top_n: int | None = Field(None, ge=0, lt=_INT32)
    return_documents: bool | None = None
    instruction: Text | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        query = _text(self.query)
        return [(query, text) for text in _texts(self.documents)]


# vLLM's names of both sides.
_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_SIDES = tuple(tuple(dict.fromkeys(side)) for side in zip(*_NAMES, strict=True))


class ScoreRequest(VectorFields):
    """Pairs of texts: one text_1 for all of text_2, or one each. They have other names, too: queries and documents,
    queries and items, data_1 and data_2."""

    text_1: Items = Field(validation_alias=AliasChoices(*_SIDES[0]))
    text_2: Items = Field(validation_alias=AliasChoices(*_SIDES[1]))
    instruction: Text | None = None

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """A request has both sides by any of their names."""
        for side in _SIDES:
            schema["properties"] |= dict.fromkeys(side, schema["properties"][side[0]])
        del schema["required"]
        schema["anyOf"] = [{"required": list(names)} for names in itertools.product(*_SIDES)]

    @property
    def pairs(self) -> list[tuple[str, str]] | None:
        """The pairs; None if the counts of both texts do not match."""
        first, second = _texts(self.text_1), _texts(self.text_2)
        if len(first) == 1:
            first *= len(second)
        return list(zip(first, second, strict=True)) if len(first) == len(second) else None
