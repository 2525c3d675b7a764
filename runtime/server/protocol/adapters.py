"""Requests of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from .api_model import ApiModel

AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=255)]
AdapterPath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class LoadAdapterRequest(ApiModel):
    """lora_path: a directory of the machine that the server runs on."""

    lora_name: AdapterName
    lora_path: AdapterPath


class UnloadAdapterRequest(ApiModel):
    """A name that was loaded."""

    lora_name: AdapterName
