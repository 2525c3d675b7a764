"""Rankings as Jina and Cohere have them, and scores as vLLM has them: how well documents answer a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .. import answers
from ..bodies import json_route
from ..context import ServerContext
from ..errors import ApiError
from ..json_text import json_response
from ..protocol.vectors import RerankRequest, ScoreRequest
from ..refusals import CONFLICT
from ..vectors import encoded, most_of, rows_of, task_of, usage_of


def router(server: ServerContext) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["vectors"], route_class=json_route(server.lanes.bodies))

    async def scored(
        request: Request, body: RerankRequest | ScoreRequest, pairs: Sequence[tuple[str, str]], answer_id: str
    ) -> tuple[list[float], dict[str, Any]]:
        """Scores of pairs, and the usage."""
        task, tokenizer = task_of(server, "rank"), server.tokenizer
        most = most_of(server, body.truncate_prompt_tokens)

        def ids_of() -> list[list[int]]:
            return [task.pair_ids(tokenizer, first, second, body.instruction, most) for first, second in pairs]

        param = "documents" if isinstance(body, RerankRequest) else "text_2"
        ids = await encoded(server, [text for pair in pairs for text in pair], ids_of, param)
        rows = await rows_of(server, request, ids, answer_id, body.priority)
        return [task.score(row) for row in rows], usage_of(ids)

    @routes.post("/rerank", response_model=None, include_in_schema=False)
    @routes.post("/v2/rerank", response_model=None, include_in_schema=False)
    @routes.post("/v1/rerank", response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents, those that answer the query best first."""
        task_of(server, "rank")
        model = server.check_model(body.model)
        pairs, answer_id = body.pairs, answers.new_id("rerank")
        scores, usage = await scored(request, body, pairs, answer_id)
        # With equal scores, the earlier document comes first.
        order = sorted(range(len(pairs)), key=lambda i: -scores[i])[: body.top_n or None]

        def answer() -> dict[str, Any]:
            results = []
            for i in order:
                result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
                if body.return_documents is not False:
                    result["document"] = {"text": pairs[i][1]}
                results.append(result)
            return {"id": answer_id, "model": model, "results": results, "usage": usage}

        return await json_response(server.lanes, answer, sum(len(text) for _, text in pairs))

    @routes.post("/score", response_model=None, include_in_schema=False)
    @routes.post("/v1/score", response_model=None)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores of pairs of texts, in their order."""
        task_of(server, "rank")
        model = server.check_model(body.model)
        pairs = body.pairs
        if pairs is None:
            message = "text_1 and text_2 have different lengths: give one text_1, or as many as of text_2"
            raise ApiError(message, param="text_1", code=CONFLICT)
        answer_id = answers.new_id("score")
        scores, usage = await scored(request, body, pairs, answer_id)

        def answer() -> dict[str, Any]:
            data = [{"object": "score", "index": i, "score": one} for i, one in enumerate(scores)]
            head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model}
            return {**head, "data": data, "usage": usage}

        return await json_response(server.lanes, answer, len(scores))

    return routes
