"""Tool calls: what a chat request's tools mean for its prompt, its constraint and the reading of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.guides import Guided

from ..chat_output import ChatOutput, PlainOutput
from ..errors import ApiError
from ..guided import guided_of
from ..protocol.chat import ChatRequest

if TYPE_CHECKING:
    from ..context import ServerContext


@dataclass(frozen=True)
class ChatPlan:
    """tools: for the template, None for none. guided: the constraint of the answer. output: reads one continuation."""

    tools: Sequence[Mapping[str, Any]] | None
    guided: Guided | None
    output: Callable[[], ChatOutput]


def plan_chat(server: ServerContext, request: ChatRequest) -> ChatPlan:
    """What a request asks for beside its messages. Raises ApiError and RequestError."""
    if request.tools and request.tool_choice != "none":
        raise ApiError("tools are not supported yet: leave them out", param="tools", code="unsupported_parameter")
    return ChatPlan(None, guided_of(request), PlainOutput)
