"""Requests of /v1/embeddings, /v1/rerank, /v1/score and /classify."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from .api_model import ApiModel
from .common import is_token_ids
from .completions import Prompt
from .shapes import Text, list_of, one_of, shaped, text_or_list

_INT32 = 2**31
MAX_DOCUMENTS = 1024


class VectorFields(ApiModel):
    """truncate_prompt_tokens: the most tokens of a text, which is cut at its end; -1: as many as fit. priority: lower
    runs first."""

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT32)
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


class DocumentPart(TypedDict):
    text: str


def _kind(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "object" if isinstance(value, dict) else None


_DOCUMENT = one_of('give a string, or an object with "text"', _kind, {"text": str, "object": DocumentPart})
Documents = Annotated[list[Any], shaped(list_of(_DOCUMENT, min_length=1, max_length=MAX_DOCUMENTS))]
_TEXTS = list_of(str, min_length=1, max_length=MAX_DOCUMENTS)
Texts = Annotated[Any, shaped(one_of("give a string, or a list of them", text_or_list, {"text": str, "list": _TEXTS}))]


class RerankRequest(VectorFields):
    """documents are sorted by how well they answer the query. top_n: how many of the best to return. instruction:
    what the model is told to look for, where it takes that."""

    query: Text
    documents: Documents
    top_n: int | None = Field(None, ge=1, lt=_INT32)
    return_documents: bool | None = None
    instruction: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one["text"] for one in self.documents]


class ScoreRequest(VectorFields):
    """Pairs of texts: one text_1 for all of text_2, or one each."""

    text_1: Texts
    text_2: Texts
    instruction: Text | None = None

    @property
    def pairs(self) -> list[tuple[str, str]] | None:
        """The pairs; None if the counts of both texts do not match."""
        second = [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)
        first = [self.text_1] * len(second) if isinstance(self.text_1, str) else list(self.text_1)
        if len(first) == 1:
            first *= len(second)
        return list(zip(first, second, strict=True)) if len(first) == len(second) else None
