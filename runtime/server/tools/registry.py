"""Parsers by exact name, and the parser of each model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.runtime.text.tokenizer import Tokenizer

from ..reasoning import STYLES, ReasoningStyle, reasoning_style
from .hermes import HermesParser
from .llama3_json import Llama3JsonParser
from .mistral import MistralParser
from .parser import ToolCallParser

TOOL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
# model_type → parser, and a token; a model without that token was not trained to call tools.
_FAMILIES: Mapping[str, tuple[type[ToolCallParser], str]] = {
    "qwen2": (HermesParser, "<tool_call>"),
    "qwen3": (HermesParser, "<tool_call>"),
    "llama": (Llama3JsonParser, "<|python_tag|>"),
    "mistral": (MistralParser, "[TOOL_CALLS]"),
}


@dataclass(frozen=True)
class ChatParsers:
    """Parsers of a model's answers; None: no parsing."""

    tool: type[ToolCallParser] | None
    reasoning: ReasoningStyle | None


def choose_parsers(
    tool: str | None, reasoning: str | None, model_type: str | None, tokenizer: Tokenizer | None
) -> ChatParsers:
    """Parsers by name. None and "auto" choose the one of the model's family, "none" chooses none.

    Raises ValueError, one sentence, for an unknown name.
    """
    for flag, name, known in (("tool-call-parser", tool, TOOL_PARSERS), ("reasoning-parser", reasoning, STYLES)):
        if name not in (None, "auto", "none", *known):
            raise ValueError(f"--{flag} {name!r} is unknown: use auto, none, {', '.join(known)}")

    def has(token: str) -> bool:
        return tokenizer is not None and tokenizer.token_id(token) is not None

    tool_parser = TOOL_PARSERS.get(tool or "auto")
    if tool in (None, "auto") and (known_family := _FAMILIES.get(model_type or "")) is not None:
        family, token = known_family
        tool_parser = family if has(token) else None
    style = STYLES.get(reasoning or "auto")
    if reasoning in (None, "auto") and tokenizer is not None:
        style = reasoning_style(model_type, tokenizer)
    return ChatParsers(tool_parser, style)
