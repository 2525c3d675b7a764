"""`LLM`'s calls for models that give vectors: embeddings, scores of pairs and of labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from llmc.runtime.text.tokenizer import Tokenizer

from .context_limit import ContextLimit
from .engine_steps import EngineSteps
from .outputs import EmbeddingOutput, LabelOutput, ScoreOutput
from .prompts import as_batch, checked_ids
from .request_error import RequestError
from .vector_runs import run_vectors
from .vector_task import Vector, VectorTask

Progress = Callable[[int, int], None]
Texts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Ids = list[list[int]]


class VectorPrompts(ABC):
    """Common code of `LLM` and `AsyncLLM`: from texts to input ids that the engine can take."""

    engine: Any
    limit: ContextLimit
    vector_task: VectorTask | None
    vocab_size: int

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError if the artifact has none."""

    @property
    def task(self) -> str:
        """Task that the artifact was compiled for: "generate", "embed", "rank" or "classify"."""
        return "generate" if self.vector_task is None else self.vector_task.name

    def _task(self, name: str) -> VectorTask:
        if self.vector_task is None:
            raise RequestError(f"this model writes text: compile one with --task {name}")
        self.vector_task.must_be(name)
        return self.vector_task

    def _ids(self, task: VectorTask, prompts: Texts, truncate: bool) -> Ids:
        most = self.limit.longest_prompt if truncate else None
        texts = (task.text_ids(self.tokenizer, one, most) if isinstance(one, str) else one for one in as_batch(prompts))
        checked = (checked_ids(i, ids, self.vocab_size, self.limit, most) for i, ids in enumerate(texts))
        return [task.unpadded(ids) for ids in checked]

    def _pairs(
        self,
        task: VectorTask,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None,
        truncate: bool,
    ) -> Ids:
        second = [documents] if isinstance(documents, str) else list(documents)
        first = [queries] * len(second) if isinstance(queries, str) else list(queries)
        if len(first) != len(second):
            raise RequestError(f"{len(first)} queries for {len(second)} documents: give one, or one each")
        most = self.limit.longest_prompt if truncate else None
        pairs = zip(first, second, strict=True)
        found = (task.pair_ids(self.tokenizer, query, document, instruction, most) for query, document in pairs)
        return [checked_ids(i, ids, self.vocab_size, self.limit) for i, ids in enumerate(found)]


def embeddings_of(task: VectorTask, ids: Ids, rows: Sequence[Vector], dimensions: int | None) -> list[EmbeddingOutput]:
    shortened = (task.shortened(row, dimensions) for row in rows)
    return [EmbeddingOutput(i, tuple(one), row) for i, (one, row) in enumerate(zip(ids, shortened, strict=True))]


def scores_of(task: VectorTask, ids: Ids, rows: Sequence[Vector]) -> list[ScoreOutput]:
    return [
        ScoreOutput(i, task.tokens_of(one), task.score(row)) for i, (one, row) in enumerate(zip(ids, rows, strict=True))
    ]


def labels_of(task: VectorTask, ids: Ids, rows: Sequence[Vector]) -> list[LabelOutput]:
    outputs = []
    for i, (one, row) in enumerate(zip(ids, rows, strict=True)):
        scores = dict(zip(task.labels, task.scores(row).tolist(), strict=True))
        outputs.append(LabelOutput(i, tuple(one), max(scores, key=lambda label: scores[label]), scores))
    return outputs


class VectorCalls(VectorPrompts):
    """Calls of `LLM` for models that give vectors."""

    max_num_seqs: int
    _steps: EngineSteps

    def embed(
        self,
        prompts: Texts,
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[EmbeddingOutput]:
        """Vectors of texts, or of lists of token ids, in their order.

        dimensions: keep only that many leading numbers of each; for models trained for that. truncate: cut a text that
        is too long at its end. progress: called with (prompts done, all). Raises RequestError for an invalid text,
        before any of them runs.
        """
        task = self._task("embed")
        task.check_dimensions(dimensions)
        ids = self._ids(task, prompts, truncate)
        return embeddings_of(task, ids, self._rows(task, ids, progress), dimensions)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[ScoreOutput]:
        """How well documents answer queries: one query for all documents, or one each.

        instruction: tells the model what to look for, if it accepts one. truncate: cut a document that is too long at
        its end. Raises RequestError.
        """
        task = self._task("rank")
        ids = self._pairs(task, queries, documents, instruction, truncate)
        return scores_of(task, ids, self._rows(task, ids, progress))

    def classify(
        self, prompts: Texts, *, truncate: bool = False, progress: Progress | None = None
    ) -> list[LabelOutput]:
        """The labels of texts, or lists of token ids. truncate: see `embed`. Raises RequestError."""
        task = self._task("classify")
        ids = self._ids(task, prompts, truncate)
        return labels_of(task, ids, self._rows(task, ids, progress))

    def _rows(self, task: VectorTask, ids: Ids, progress: Progress | None) -> list[Vector]:
        return run_vectors(self.engine, self._steps, ids, task.width, 4 * self.max_num_seqs + 64, progress)
