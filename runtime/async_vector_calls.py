"""`AsyncLLM`'s calls for models that return vectors."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Sequence

from llmc.runtime.binding.handle import LlmcError

from .outputs import EmbeddingOutput, LabelOutput, ScoreOutput
from .request_error import RequestError
from .server.async_engine import AsyncEngine
from .server.request_stream import RequestStream
from .server.requests import EngineRequest
from .vector_calls import Ids, Texts, VectorPrompts, embeddings_of, labels_of, scores_of
from .vector_runs import NO_TOKENS
from .vector_task import Vector, VectorTask


class AsyncVectorCalls(VectorPrompts):
    """`AsyncLLM`'s vector calls. Cancelling a task cancels its requests."""

    engine: AsyncEngine

    async def embed(
        self, prompts: Texts, *, dimensions: int | None = None, truncate: bool = False
    ) -> list[EmbeddingOutput]:
        """Arguments and errors: as for `LLM.embed`."""
        task = self._task("embed")
        task.check_dimensions(dimensions)
        ids = await asyncio.to_thread(self._ids, task, prompts, truncate)
        return embeddings_of(task, ids, await self._rows(task, ids), dimensions)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[ScoreOutput]:
        """Arguments and errors: as for `LLM.score`."""
        task = self._task("rank")
        ids = await asyncio.to_thread(self._pairs, task, queries, documents, instruction, truncate)
        return scores_of(task, ids, await self._rows(task, ids))

    async def classify(self, prompts: Texts, *, truncate: bool = False) -> list[LabelOutput]:
        """Arguments and errors: as for `LLM.classify`."""
        task = self._task("classify")
        ids = await asyncio.to_thread(self._ids, task, prompts, truncate)
        return labels_of(task, ids, await self._rows(task, ids))

    @abstractmethod
    async def _start(self) -> None:
        """Starts the engine, if it does not run yet."""

    @abstractmethod
    def _stream_of(self, request: EngineRequest) -> RequestStream:
        """Submits a request. Raises as `AsyncEngine.stream`, and RequestError once this is closed."""

    async def _rows(self, task: VectorTask, ids: Ids) -> list[Vector]:
        """The vector of each prompt. Raises RequestError for the first that fails; the others are cancelled."""
        await self._start()
        # All tasks share the engine's queue, so a long list must not fill it.
        room = asyncio.Semaphore(4 * self.engine.max_num_seqs + 64)

        async def row(index: int, prompt: list[int]) -> Vector:
            async with room:
                return await self._row(task, index, prompt)

        rows = [asyncio.create_task(row(index, prompt)) for index, prompt in enumerate(ids)]
        try:
            return list(await asyncio.gather(*rows))
        finally:
            for one in rows:
                one.cancel()
            await asyncio.gather(*rows, return_exceptions=True)

    async def _row(self, task: VectorTask, index: int, prompt: list[int]) -> Vector:
        request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            params=NO_TOKENS,
            index=index,
            vector_width=task.width,
        )
        try:
            stream = self._stream_of(request)
        except LlmcError as error:
            raise RequestError(f"prompt {index}: {error}") from error
        try:
            async for delta in stream:
                if delta.error is not None:
                    raise RequestError(f"prompt {index}: {delta.error.message}")
            vector: Vector | None = stream.vector
            if vector is None or stream.record is None or stream.record.finish_reasons != ("stop",):
                raise RequestError(f"prompt {index}: the engine gave it up")
            return vector
        finally:
            stream.close()
