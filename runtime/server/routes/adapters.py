"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while others are served.

Only with --allow-runtime-lora: whoever may ask makes the server read directories of its machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from llmc.runtime.adapters.adapters import LoadedError, UnknownAdapterError
from llmc.runtime.adapters.peft import NoAdapterError
from llmc.runtime.adapters.tensors import AdapterError

from ..bodies import json_route
from ..context import ServerContext
from ..errors import ApiError
from ..protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest


def router(server: ServerContext) -> APIRouter:
    """The endpoints; they need an API key where the others do."""
    routes = APIRouter(tags=["models"], route_class=json_route(server.lanes.bodies))

    @routes.post("/v1/load_lora_adapter", response_model=None)
    async def load_adapter(body: LoadAdapterRequest) -> PlainTextResponse:
        """Loads an adapter under a name, which requests give as their model. 404 where the path has none."""
        if body.lora_name in server.config.served_model_names:
            raise ApiError(
                f"{body.lora_name!r} is the name of the model: choose another one", param="lora_name", code="name_taken"
            )
        try:
            await asyncio.to_thread(server.engine.adapters.load, body.lora_name, Path(body.lora_path))
        except NoAdapterError as error:
            raise ApiError(str(error), status=404, param="lora_path", code="adapter_not_found") from error
        except LoadedError as error:
            raise ApiError(str(error), param="lora_name", code="name_taken") from error
        except AdapterError as error:
            raise ApiError(str(error), param="lora_path", code="adapter_refused") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_adapter(body: UnloadAdapterRequest) -> PlainTextResponse:
        """Takes a name away. Requests that run with the adapter end with it; 404 for a name that has none."""
        try:
            server.engine.adapters.unload(body.lora_name)
        except UnknownAdapterError as error:
            raise ApiError(str(error), status=404, param="lora_name", code="adapter_not_found") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
