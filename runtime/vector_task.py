"""Tasks of an artifact with vectors (embeddings, scores of pairs, labels), and how texts become rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.manifest import ManifestError, read_manifest
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import NoRoom, Tokenizer

Vector = NDArray[np.float32]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Default for pairs of a model that expects an instruction."""
_DOES = {"embed": "gives embeddings", "rank": "scores pairs of texts", "classify": "scores labels of texts"}
_PLACES = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True)
class VectorTask:
    """The task as in the manifest. name: "embed", "rank" or "classify". width: numbers of a vector. vocab_size: tokens;
    if typed, the input id also encodes the kind of token. The others: see `models/config.py`."""

    name: str
    width: int
    normalised: bool
    activation: str | None
    labels: tuple[str, ...]
    template: str | None
    vocab_size: int
    typed: bool
    pad_token_id: int | None = None

    @classmethod
    def of_artifact(cls, path: Path, width: int) -> VectorTask | None:
        """None for an artifact that generates text. width: as in its tables, 0 for none. Raises RequestError."""
        if not width:
            return None
        try:
            model = read_manifest(path).get("model") or {}
        except ManifestError as error:
            raise RequestError(str(error)) from None
        pooled: Mapping[str, Any] = model.get("pooled") or {}
        task: Mapping[str, Any] = model.get("task") or {"name": "embed"}
        return cls(
            name=str(task["name"]),
            width=width,
            normalised=bool(pooled.get("normalised", False)),
            activation=task.get("activation"),
            labels=tuple(task.get("labels") or ()),
            template=task.get("template"),
            vocab_size=int(model.get("vocab_size", 0)),
            typed=bool(model.get("typed_inputs", False)),
            pad_token_id=task.get("pad_token_id"),
        )

    def must_be(self, *names: str) -> None:
        """Raises RequestError if the task is none of `names`."""
        if self.name not in names:
            raise RequestError(f"this model {_DOES[self.name]}: compile one with --task {' or '.join(names)}")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises RequestError for more dimensions than a vector has."""
        if dimensions is not None and not (isinstance(dimensions, int) and 1 <= dimensions <= self.width):
            raise RequestError(f"dimensions is {dimensions}: use 1 to {self.width}, which the model's vectors have")

    def shortened(self, vector: Vector, dimensions: int | None) -> Vector:
        """The leading numbers of an embedding, normalized to length 1 if the model's vectors are."""
        if dimensions is None or dimensions == self.width:
            return vector
        first = vector[:dimensions].astype(np.float64)
        if self.normalised:
            first /= max(float(np.sqrt((first * first).sum())), 1e-12)
        return first.astype(np.float32)

    def scores(self, row: Vector) -> Vector:
        """Scores from the numbers of a row."""
        x = row.astype(np.float64)
        if self.activation == "sigmoid":
            x = 1.0 / (1.0 + np.exp(-x))
        elif self.activation == "softmax":
            x = np.exp(x - x.max())
            x /= x.sum()
        return x.astype(np.float32)

    def score(self, row: Vector) -> float:
        """Score of a pair; with two numbers, the probability of the better label."""
        return float(self.scores(row)[-1])

    def tokens_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of input ids, which may say the type of each as well."""
        return tuple(one % self.vocab_size for one in ids) if self.typed else tuple(ids)

    def text_ids(self, tokenizer: Tokenizer, text: str, most: int | None = None) -> list[int]:
        """Input ids of a text. most: see `Tokenizer.encode_row`."""
        return self.unpadded(tokenizer.encode_row(text, most=most)[0])

    def unpadded(self, ids: list[int]) -> list[int]:
        """The ids up to the one whose row is taken: the last that is no padding, or the first if all are. No row sees
        those behind it."""
        if self.pad_token_id is None:
            return ids
        end = next((i for i in range(len(ids), 1, -1) if ids[i - 1] != self.pad_token_id), 1)
        return ids[:end]

    def pair_ids(
        self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None = None, most: int | None = None
    ) -> list[int]:
        """Input ids of a pair. most: limit of ids; the document is cut at its end. Raises RequestError, also for an
        instruction that the model does not take."""
        return self.unpadded(self._pair_ids(tokenizer, query, document, instruction, most))

    def _pair_ids(
        self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None, most: int | None
    ) -> list[int]:
        if self.template is None:
            if instruction is not None:
                raise RequestError("this model takes no instruction: leave it out")
            ids, kinds = tokenizer.encode_row(query, document, most=most)
            return (
                [token + kind * self.vocab_size for token, kind in zip(ids, kinds, strict=True)] if self.typed else ids
            )
        given = {"instruction": instruction or INSTRUCTION, "query": query, "document": document}
        # Each placeholder is replaced once; the inserted text is not searched.
        before, text = _PLACES.split(self.template), ""
        parts = [given[part] if i % 2 else part for i, part in enumerate(before)]
        text = "".join(parts)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if most is None or len(ids) <= most:
            return ids
        at = before.index("document")
        # The document is not tokenized by itself: its first word is one with the space before it.
        before_it, through_it, behind_it = (
            tokenizer.encode("".join(some), add_special_tokens=False)
            for some in (parts[:at], parts[: at + 1], parts[at + 1 :])
        )
        room = most - len(behind_it)
        if room <= len(before_it):
            around = len(before_it) + len(behind_it)
            raise NoRoom(most, "the document", around + 1, f"{around} around it", ", or shorten the query")
        return [*through_it[:room], *behind_it]
