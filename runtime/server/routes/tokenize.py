"""/tokenize and /detokenize: what the model sees."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ..bodies import json_route
from ..bounds import check_bounds
from ..context import ServerContext
from ..json_text import json_response
from ..prompts import MAX_TEXT_TOKENS, check_chars, encode_chat_ids
from ..protocol.completions import DetokenizeRequest, TokenizeRequest


def router(server: ServerContext) -> APIRouter:
    """The endpoints; they answer before the server is ready, too."""
    routes = APIRouter(tags=["tokenizer"], route_class=json_route(server.lanes.bodies))

    @routes.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation, longer than the context, too."""
        server.check_model(body.model)
        body.check()
        tokenizer = server.tokenizer
        if body.messages is not None:
            ids, _ = await encode_chat_ids(
                server,
                body.messages,
                tools=body.tools,
                variables=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            text = body.prompt or ""
            check_chars(server, text)
            special = body.add_special_tokens is not False
            work = lambda: tokenizer.encode(text, add_special_tokens=special, most=MAX_TEXT_TOKENS)  # noqa: E731
            ids = await server.lanes.run(work, len(text))

        def answer() -> dict[str, Any]:
            told: dict[str, Any] = {"count": len(ids), "max_model_len": server.engine.max_model_len, "tokens": ids}
            if body.return_token_strs:
                told["token_strs"] = [server.token_texts.label(token_id) for token_id in ids]
            return told

        return await json_response(server.lanes, answer, len(ids))

    @routes.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special tokens included unless skip_special_tokens is true."""
        server.check_model(body.model)
        check_bounds(server.engine, body)
        tokenizer, skip = server.tokenizer, bool(body.skip_special_tokens)
        work = lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip)  # noqa: E731
        text = await server.lanes.run(work, len(body.tokens))
        return await json_response(server.lanes, lambda: {"prompt": text}, len(body.tokens))

    return routes
