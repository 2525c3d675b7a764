"""Answers of the endpoints for vectors and scores, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from .responses import Answer, Count


class VectorUsage(Answer):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(Answer):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class Document(Answer):
    text: str


class Ranked(Answer):
    index: Count
    relevance_score: float
    document: Document | None = None


class RerankAnswer(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage


class Score(Answer):
    object: Literal["score"]
    index: Count
    score: float


class ScoreAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class Label(Answer):
    index: Count
    label: str
    probs: list[float]
    num_classes: Count


class ClassifyAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Label]
    usage: VectorUsage
