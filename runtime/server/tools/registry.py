"""Parsers by exact name, and the parser of a model by its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.runtime.text.tokenizer import Tokenizer

from ..reasoning import STYLES, ReasoningStyle, reasoning_style
from .gemma4 import Gemma4Parser
from .hermes import HermesParser
from .llama3_json import Llama3JsonParser
from .mistral import MistralParser
from .parser import ToolCallParser
from .pythonic import Lfm2Parser, PythonicParser

TOOL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "gemma4": Gemma4Parser,
    "lfm2": Lfm2Parser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
}
# Parser, what a chat template shows of its calls, and tokens: a model without any was not trained to call tools.
_SHOWN: tuple[tuple[type[ToolCallParser], re.Pattern[str], tuple[str, ...]], ...] = (
    # The object may be in a string of the template's own. Other formats have <tool_call>, too, but no JSON in it.
    (HermesParser, re.compile(r"""<tool_call>(?:\\n|[\s"'{}+~-])*\\?"name\\?":"""), ("<tool_call>",)),
    (MistralParser, re.compile(r"\[TOOL_CALLS\]"), ("[TOOL_CALLS]",)),
    (Gemma4Parser, re.compile(r"<\|tool_call>call:"), ("<|tool_call>",)),
    # Most templates of LFM2 show the list of tools alone.
    (
        Lfm2Parser,
        re.compile(r"<\|tool_(call|list)_start\|>|List of tools: ?\["),
        ("<|tool_call_start|>",),
    ),
    # As Meta words it, with names that are placeholders.
    (PythonicParser, re.compile(r"\[func_name1\("), ("<|python_start|>", "<|python_tag|>")),
    # Templates also list what a function's parameters are, behind its description: in a call they follow the name. The
    # braces are the template's own.
    (
        Llama3JsonParser,
        re.compile(r"""\{\\?"name\\?":(?:(?!"\w+\\?":)[^{}]|\}\}|\{\{){0,200}"parameters\\?":"""),
        ("<|python_tag|>",),
    ),
)


@dataclass(frozen=True)
class ChatParsers:
    """Parsers of a model's answers; None: no parsing."""

    tool: type[ToolCallParser] | None
    reasoning: ReasoningStyle | None


def choose_parsers(tool: str | None, reasoning: str | None, tokenizer: Tokenizer | None) -> ChatParsers:
    """Parsers by name. None and "auto" choose the one that the chat template shows, "none" chooses none.

    Raises ValueError, one sentence, for an unknown name.
    """
    for flag, name, known in (("tool-call-parser", tool, TOOL_PARSERS), ("reasoning-parser", reasoning, STYLES)):
        if name not in (None, "auto", "none", *known):
            raise ValueError(f"--{flag} {name!r} is unknown: use auto, none, {', '.join(known)}")
    tool_parser = TOOL_PARSERS.get(tool or "auto")
    if tool in (None, "auto") and tokenizer is not None:
        tool_parser = _shown_parser(tokenizer)
    style = STYLES.get(reasoning or "auto")
    if reasoning in (None, "auto") and tokenizer is not None:
        style = reasoning_style(tokenizer)
    return ChatParsers(tool_parser, style)


def _shown_parser(tokenizer: Tokenizer) -> type[ToolCallParser] | None:
    """The parser of the calls in the model's chat template; None if it shows none that is known."""
    text = tokenizer.chat_template_text
    shown = next(((parser, tokens) for parser, pattern, tokens in _SHOWN if pattern.search(text)), None)
    return shown[0] if shown is not None and any(tokenizer.token_id(token) is not None for token in shown[1]) else None
