"""The prompts of `llmc run`, and their file formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmc.regular_file import JsonError, parse_json, read_text
from llmc.shown import shown

_KEYS = ("prompt", "prompt_token_ids", "messages")
_MORE_KEYS = ("tools", "lora", "images")
_MAX_FILE_BYTES = 1 << 32


class PromptError(ValueError):
    """A prompt file is unusable; the message is one sentence with file and line."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: exactly one of a text, token ids, or the messages of a conversation, which may have tools.

    lora: name of its adapter; None if not stated. images: files, in front of a text or at its placeholders.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    lora: str | None = None
    images: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """The prompt's part of an output line; equal records mean equal prompts."""
        record: dict[str, Any] = {"prompt": self.text}
        if self.token_ids is not None:
            record["prompt_token_ids"] = list(self.token_ids)
        if self.messages is not None:
            record["messages"] = list(self.messages)
        if self.tools is not None:
            record["tools"] = list(self.tools)
        if self.lora is not None:
            record["lora"] = self.lora
        if self.images:
            record["images"] = list(self.images)
        return record

    def as_chat(self) -> tuple[dict[str, Any], ...] | None:
        """The conversation: the messages, or the text as a user message; None for token ids."""
        if self.text is not None and self.images:
            parts = [{"type": "image", "image": image} for image in self.images]
            return ({"role": "user", "content": [*parts, {"type": "text", "text": self.text}]},)
        if self.text is not None:
            return ({"role": "user", "content": self.text},)
        return self.messages


def read_file(path: Path, what: str = "prompt", *, may_be_empty: bool = False) -> list[Prompt]:
    """Reads FILE.jsonl (one object per line) or FILE.txt (one prompt per line); skips blank lines. what: their
    name in errors. may_be_empty: take an object with an empty text. Raises PromptError."""
    if path.suffix not in (".jsonl", ".txt"):
        raise PromptError(f"{what}s file {path} must end in .jsonl or .txt")
    try:
        text = read_text(path, _MAX_FILE_BYTES, "utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read {what}s file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{what}s file {path} is not UTF-8 at byte {error.start}: convert it first") from error
    # splitlines() would also split at characters that may occur in a prompt.
    lines = text.split("\n")
    json_lines = path.suffix == ".jsonl"
    prompts = parse_jsonl(lines, str(path), may_be_empty=may_be_empty) if json_lines else parse_lines(lines)
    if not prompts:
        raise PromptError(f"{what}s file {path} has no {what}s: give one a line")
    return prompts


def parse_lines(lines: Iterable[str]) -> list[Prompt]:
    """One prompt per line; blank lines are skipped."""
    return [Prompt(text=line.rstrip("\r\n")) for line in lines if line.strip()]


def parse_jsonl(lines: Iterable[str], name: str, *, may_be_empty: bool = False) -> list[Prompt]:
    """One JSON object per line, with `prompt` and optionally `images`, `prompt_token_ids`, or `messages` and optionally
    `tools`; optionally `lora`.

    may_be_empty: take an empty `prompt`. Raises PromptError naming the line.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            record = parse_json(line)
        except JsonError as error:
            raise PromptError(f"{where} is not valid JSON: {error}; write one object a line") from error
        prompts.append(_from_record(record, where, may_be_empty))
    return prompts


def _from_record(record: Any, where: str, may_be_empty: bool) -> Prompt:
    if not isinstance(record, dict):
        raise PromptError(f'{where} is not a JSON object: write {{"prompt": …}}')
    unknown = [key for key in record if key not in _KEYS + _MORE_KEYS]
    if unknown:
        raise PromptError(f"{where} has the unknown key {shown(unknown[0])}: use one of {', '.join(_KEYS)}")
    keys = [key for key in record if key in _KEYS]
    if len(keys) != 1:
        raise PromptError(f"{where} has {len(keys)} prompts: give exactly one of {', '.join(_KEYS)}")
    key, lora = keys[0], record.get("lora")
    if "lora" in record and (not isinstance(lora, str) or not lora):
        raise PromptError(f"{where}: lora {shown(lora)} is not the name of an adapter: give a text, or leave it out")
    return replace(_prompt(record, key, where, may_be_empty), lora=lora)


def _prompt(record: dict[str, Any], key: str, where: str, may_be_empty: bool) -> Prompt:
    value, tools = record[key], record.get("tools")
    images = record.get("images", [])
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise PromptError(f"{where}: images {shown(images)} is not a list of files")
    if images and key != "prompt":
        raise PromptError(f"{where} has images beside {key}: give prompt instead, or put them into the messages")
    if "tools" in record and key != "messages":
        raise PromptError(f"{where} has tools beside {key}: give messages instead, or leave tools out")
    if key == "prompt":
        if not isinstance(value, str) or not (value or may_be_empty):
            kind = "text" if may_be_empty else "non-empty text"
            raise PromptError(f"{where}: prompt {shown(value)} is not a {kind}: leave the line out")
        return Prompt(text=value, images=tuple(images))
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: {key} must be a non-empty list")
    if key == "prompt_token_ids":
        for token in value:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise PromptError(f"{where}: token id {shown(token)} is not a whole number of at least 0")
        return Prompt(token_ids=tuple(value))
    if not all(isinstance(message, dict) for message in value):
        raise PromptError(f"{where}: messages must be objects with role and content")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise PromptError(f"{where}: tools must be a list of objects, each the JSON schema of a function")
    return Prompt(messages=tuple(value), tools=None if tools is None else tuple(tools))
