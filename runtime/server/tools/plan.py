"""Plan of a chat request: tools for its prompt, a constraint, and the parser of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.guided.constraint import Guided
from llmc.runtime.guided.shared_guides import Guide
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.output_format import guided_of
from llmc.runtime.text.tokenizer import Tokenizer

from ..chat_output import ChatOutput
from ..context import ServerContext
from ..errors import ApiError
from ..protocol.chat import ChatRequest
from ..reasoning import ReasoningStyle, after_reasoning, starts_in_reasoning
from ..refusals import CONFLICT, CONSTRAINT
from .definitions import ToolUse, read_tools
from .output import ChatOutputParser
from .parser import ToolCallParser
from .plain_json import PlainJsonParser

_PROMPT_END = 16  # tokens that show whether the prompt opened the reasoning


@dataclass(frozen=True)
class ChatPlan:
    """tools: for the template, None for none. guided: the constraint of the answer, None for none.

    show_special_tokens: whether a parser needs them in the text.
    """

    tools: Sequence[Mapping[str, Any]] | None
    guided: Guided | None
    show_special_tokens: bool
    _tokenizer: Tokenizer
    _vocab_size: int
    _style: ReasoningStyle | None
    _parser: type[ToolCallParser] | None
    _use: ToolUse | None

    def guide(self, make: Callable[[], Guide] | None, prompt_ids: Sequence[int]) -> Callable[[], Guide] | None:
        """`make`, wrapped so that the guides of a reasoning model apply only after its reasoning."""
        if make is None or self._style is None:
            return make
        style, token_id = self._style, self._tokenizer.token_id
        never = token_id(style.breaks) if style.breaks else None
        inside = self._inside(prompt_ids)
        return after_reasoning(make, self._vocab_size, token_id(style.open), token_id(style.close), inside, never)

    def output(self, prompt_ids: Sequence[int], answer_id: str) -> Callable[[int], ChatOutput]:
        """Makes parsers for the answers to a prompt, by index of the continuation."""
        style, inside = self._style, self._inside(prompt_ids)
        parser, use = self._parser, self._use

        def make(output_index: int) -> ChatOutput:
            calls = None
            if parser is not None and use is not None:
                calls = parser({tool.name for tool in use.tools}, f"{answer_id} {output_index}")
            counts = use is not None and not use.named
            return ChatOutputParser(None if style is None else style.parser(inside), calls, count_calls=counts)

        return make

    def _inside(self, prompt_ids: Sequence[int]) -> bool:
        if self._style is None:
            return False
        end = self._tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)
        return starts_in_reasoning(self._style, end)


def plan_chat(server: ServerContext, request: ChatRequest) -> ChatPlan:
    """The plan of a request. Raises ApiError and RequestError."""
    parsers = server.chat_parsers
    guided = guided_of(request, server.schema_defaults)
    use = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls, server.schema_defaults)
    parser = parsers.tool
    if use is not None:
        if parser is None and not use.required:
            message = (
                "this model has no known format of tool calls: start the server with --tool-call-parser, "
                "or set tool_choice to required or a function"
            )
            raise ApiError(message, param="tools", code="unsupported_parameter")
        # The constraint's output can be parsed whatever format the model was trained on.
        parser = parser or PlainJsonParser
        guided = _with_calls(use, guided, parser, server.tokenizer)
    style = parsers.reasoning
    return ChatPlan(
        tools=None if use is None else request.tools,
        guided=guided,
        show_special_tokens=use is not None or (style is not None and style.is_hidden(server.tokenizer)),
        _tokenizer=server.tokenizer,
        _vocab_size=server.engine.vocab_size,
        _style=style,
        _parser=parser,
        _use=use,
    )


def _with_calls(
    use: ToolUse, guided: Guided | None, parser: type[ToolCallParser], tokenizer: Tokenizer
) -> Guided | None:
    """Grammar of an answer with tools; None if it needs none.

    The answer must call tools, may call them in place of a given form, or may contain calls of strict tools.
    """
    if guided is None and not use.required and not any(tool.strict for tool in use.tools):
        return None
    start = "start: calls" if use.required or guided is not None else "start: free"
    parts = [tool.guided() for tool in use.tools]
    if guided is not None and not use.required:
        if guided.kind not in ("json_schema", "json_object"):
            message = f"a {guided.kind} and tools exclude each other: set tool_choice to none, or use a JSON schema"
            raise ApiError(message, param="tool_choice", code=CONFLICT)
        schema = json.loads(guided.source)["grammars"][0]["json_schema"]
        start = f"start: calls | answer\nanswer: %json {json.dumps(schema, ensure_ascii=False)}"
        parts.append(("response_format", guided))
    try:
        return Guided.lark("tools", f"{start}\n{parser.grammar(use.tools, use.parallel, tokenizer)}", parts)
    except RequestError as error:
        raise ApiError(str(error), param="tools", code=CONSTRAINT) from error
