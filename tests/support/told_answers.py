"""Answers cut into pieces, and what the deltas that parsers tell of them add up to."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from llmc.runtime.server.chat_output import ChatDelta
from llmc.runtime.text.tokenizer import Tokenizer


def cut(text: str, borders: list[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def message(deltas: list[ChatDelta]) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of the calls that deltas add up to; checks the form of the deltas."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for part in (part for delta in deltas for part in delta.tool_calls):
        if "id" in part:
            assert part["index"] == len(calls)
            assert part["type"] == "function"
            assert part["function"]["arguments"] == ""
            ids.add(part["id"])
            calls.append((part["function"]["name"], ""))
        else:
            assert part["index"] == len(calls) - 1
            assert set(part["function"]) == {"arguments"}
            assert part["function"]["arguments"]
            calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    assert len(ids) == len(calls)
    return "".join(delta.content for delta in deltas), calls


def special_tokenizer(path: Path, special: list[str], chat_template: str | None = None) -> Tokenizer:
    """A tokenizer in the folder, with special tokens only."""
    backend = Backend(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.add_special_tokens(special)
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path, chat_template)
