"""`AsyncLLM` with models that give vectors: the same bits as `LLM`, tasks side by side, what is refused, who leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.async_llm import AsyncLLM
from llmc.runtime.llm import LLM
from llmc.runtime.request_error import RequestError

from support.tiny_encoders import random_texts


def test_embeddings_of_tasks_side_by_side(embedder: tuple[Path, Path]) -> None:
    texts = random_texts((1, 7, 64, 33, 2, 19))

    async def run() -> list[list[np.ndarray]]:
        async with AsyncLLM(embedder[1], num_threads=1) as llm:
            assert llm.task == "embed"
            calls = [llm.embed(texts), llm.embed(texts[3]), llm.embed(texts, dimensions=12)]
            found = [[one.vector for one in outputs] for outputs in await asyncio.gather(*calls)]
            (output,) = await llm.embed("w1 w2 w1")
            assert output.prompt_token_ids[-1] == 3
        with pytest.raises(RequestError, match="this AsyncLLM is closed"):
            await llm.embed("w1")
        return found

    many, one, short = asyncio.run(run())
    with LLM(embedder[1], num_threads=1) as llm:
        wanted = [output.vector for output in llm.embed(texts)]
    for vector, other in zip(many, wanted, strict=True):
        assert np.array_equal(vector.view(np.int32), other.view(np.int32))
    assert np.array_equal(one[0].view(np.int32), wanted[3].view(np.int32))
    assert [vector.shape for vector in short] == [(12,)] * len(texts)


def test_scores(ranker: tuple[Path, Path]) -> None:
    async def run() -> list[float]:
        async with AsyncLLM(ranker[1], num_threads=1) as llm:
            outputs = await llm.score("w1 w2 w3", ["w4 w5", "w6 w7 w8 w9", "w1"])
            return [output.score for output in outputs]

    with LLM(ranker[1], num_threads=1) as llm:
        vocab_size = llm.vocab_size
        (pair,) = llm.score("w1 w2", "w4")
        assert max(pair.prompt_token_ids) < vocab_size
        assert len(pair.prompt_token_ids) > 3
        wanted = [output.score for output in llm.score("w1 w2 w3", ["w4 w5", "w6 w7 w8 w9", "w1"])]
    assert asyncio.run(run()) == wanted


def test_what_is_refused(embedder: tuple[Path, Path]) -> None:
    async def run() -> None:
        async with AsyncLLM(embedder[1], num_threads=1) as llm:
            with pytest.raises(RequestError, match="dimensions is 61: use 1 to 60"):
                await llm.embed("w1", dimensions=61)
            fraction: Any = 2.0
            with pytest.raises(RequestError, match=r"dimensions is 2\.0: use 1 to 60"):
                await llm.embed("w1", dimensions=fraction)
            text: Any = b"w1"
            with pytest.raises(RequestError, match="prompt 0 is b'w1': give a text, token ids or messages"):
                await llm.embed([text])
            with pytest.raises(RequestError, match="prompt 1 has 65 tokens and max-model-len is 64"):
                await llm.embed([[7], [7] * 65])
            with pytest.raises(RequestError, match="gives embeddings: compile one with --task classify"):
                await llm.classify("w1")
            with pytest.raises(RequestError, match="gives embeddings: compile one with --task rank"):
                await llm.score("w1", "w2")
            with pytest.raises(RequestError, match="gives embeddings: compile one with --task generate"):
                await llm.generate("w1")
            assert len(await llm.embed([[7]] * 3)) == 3

    asyncio.run(run())


def test_who_leaves_takes_nobody_along(embedder: tuple[Path, Path]) -> None:
    texts = random_texts((64,) * 40)

    async def run() -> np.ndarray:
        async with AsyncLLM(embedder[1], num_threads=1) as llm:
            leaving = asyncio.create_task(llm.embed(texts))
            staying = asyncio.create_task(llm.embed(texts[0]))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            vector: np.ndarray = (await staying)[0].vector
            llm.engine.engine.check_integrity()
            return vector

    found = asyncio.run(run())
    with LLM(embedder[1], num_threads=1) as llm:
        assert np.array_equal(found.view(np.int32), llm.embed(texts[0])[0].vector.view(np.int32))
