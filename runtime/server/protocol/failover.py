"""Fields that a router adds to a request so that another server can continue its answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from .api_model import ApiModel
from .shapes import Items

MAX_SENT = 1 << 16
"""Continuations over all prompts of a request: MAX_PROMPTS · MAX_OUTPUTS."""


class SentChoice(ApiModel):
    """What a client has of a choice. token_ids: all that were drawn; ended: and its finish reason."""

    token_ids: Items[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=list)
    ended: bool | None = None


class Failover(ApiModel):
    """id, created: of the answer. seed: of a request without one. A stream then tells in comments, `: llmc`, which
    tokens it has told. sent: where it goes on from, one entry a choice; null: nothing was told. num_events: events
    that were told, for APIs that number them."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    created: int = Field(ge=0, lt=2**53)
    seed: int = Field(ge=0, lt=2**64)
    sent: Items[SentChoice] | None = Field(None, max_length=MAX_SENT)
    num_events: int | None = Field(None, ge=0, lt=2**53)
