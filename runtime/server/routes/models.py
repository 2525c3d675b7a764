"""/v1/models: what this server has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..context import ServerContext


def router(server: ServerContext) -> APIRouter:
    """The endpoints; every served name is listed as a model of its own."""
    routes = APIRouter(tags=["models"])

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "llmc",
            "root": str(server.engine.path.name),
            "parent": None,
            "max_model_len": server.engine.max_model_len,
            "vocab_size": server.engine.vocab_size,
        }

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served names."""
        return {"object": "list", "data": [model(name) for name in server.config.served_model_names]}

    @routes.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """One served name; 404 for another."""
        return model(server.check_model(model_id))

    return routes
