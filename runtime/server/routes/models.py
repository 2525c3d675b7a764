"""/v1/models: what this server has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..context import ServerContext


def router(server: ServerContext) -> APIRouter:
    """The endpoints; every served name is listed as a model of its own, and so is every adapter, with its parent.

    artifact: the same where the same request has the same bits, as long as the servers have the same flags.
    input_modalities: only where images are seen. role, blocks: only where KV blocks are handed over; blocks is the same
    where those of equal tokens have the same bits.
    """
    routes = APIRouter(tags=["models"])

    def model(name: str) -> dict[str, Any]:
        adapter = server.adapter(name)
        return {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "llmc",
            "root": server.engine.path.name if adapter is None else adapter.path.name,
            "parent": None if adapter is None else server.model_name,
            "max_model_len": server.engine.max_model_len,
            "vocab_size": server.engine.vocab_size,
            "artifact": server.artifact_id,
            **({} if server.images.tower is None else {"input_modalities": ["text", "image"]}),
            **server.hand_over.facts(),
        }

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served names, then those of adapters."""
        adapters = [adapter.name for adapter in server.engine.adapters.all()]
        return {"object": "list", "data": [model(name) for name in (*server.config.served_model_names, *adapters)]}

    @routes.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """One served name; 404 for another."""
        return model(server.check_model(model_id))

    return routes
