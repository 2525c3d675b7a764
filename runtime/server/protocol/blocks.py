"""What a decode server asks of a prefill server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .api_model import ApiModel
from .shapes import Items


class BlocksRequest(ApiModel):
    """identity: of the caller's KV blocks. token_ids: the text, whole blocks. first_block: blocks before it are not
    wanted. memory: the caller is on this host, and takes blocks through shared memory."""

    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    token_ids: Items[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)
    first_block: int = Field(0, ge=0, lt=2**31)
    memory: bool = False
