"""/v1/embeddings: vectors of texts, as OpenAI's API has it; /classify: their labels, as vLLM has it."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.runtime.request_error import RequestError
from llmc.runtime.vector_task import Vector, VectorTask

from .. import answers
from ..bodies import json_route
from ..bounds import check_bounds
from ..context import ServerContext
from ..errors import ApiError
from ..json_text import json_response
from ..protocol.vectors import ClassifyRequest, EmbeddingRequest, InputFields
from ..refusals import TASK
from ..vectors import encoded, most_of, rows_of, task_of, usage_of


def router(server: ServerContext) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["vectors"], route_class=json_route(server.lanes.bodies))

    @routes.post("/v1/embeddings", response_model=None)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of one text or of a batch of them."""
        task = task_of(server, "embed")
        model = server.check_model(body.model)
        check_bounds(server.engine, body)
        try:
            task.check_dimensions(body.dimensions)
        except RequestError as error:
            raise ApiError(str(error), param="dimensions", code=TASK) from error
        ids = await _ids(server, task, body)
        rows = await rows_of(server, request, ids, answers.new_id("embd"), body.priority)

        def answer() -> dict[str, Any]:
            vectors = (_told(task.shortened(row, body.dimensions), body.encoding_format) for row in rows)
            data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
            return {"object": "list", "data": data, "model": model, "usage": usage_of(ids)}

        return await json_response(server.lanes, answer, len(rows) * task.width)

    @routes.post("/classify", response_model=None)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The likeliest label of each text, and how likely all of them are."""
        task = task_of(server, "classify")
        model = server.check_model(body.model)
        check_bounds(server.engine, body)
        ids = await _ids(server, task, body)
        answer_id = answers.new_id("classify")
        rows = await rows_of(server, request, ids, answer_id, body.priority)

        def answer() -> dict[str, Any]:
            data = []
            for i, scores in enumerate(map(task.scores, rows)):
                label = task.labels[int(scores.argmax())]
                data.append({"index": i, "label": label, "probs": scores.tolist(), "num_classes": len(scores)})
            head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model}
            return {**head, "data": data, "usage": usage_of(ids)}

        return await json_response(server.lanes, answer, len(rows) * task.width)

    return routes


async def _ids(server: ServerContext, task: VectorTask, body: InputFields) -> list[list[int]]:
    inputs, most = body.inputs, most_of(server, body.truncate_prompt_tokens)
    texts = [one for one in inputs if isinstance(one, str)]
    tokenizer = server.tokenizer if texts else None

    def ids_of(one: str | list[int]) -> list[int]:
        if not isinstance(one, str):
            return task.unpadded(list(one)[:most])
        assert tokenizer is not None
        return task.text_ids(tokenizer, one, most)

    return await encoded(server, texts, lambda: [ids_of(one) for one in inputs], "input")


def _told(vector: Vector, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
