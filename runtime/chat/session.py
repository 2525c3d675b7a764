"""The state of a chat: messages and sampling settings; can be saved and loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.replaced_file import write_replaced
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError
from llmc.shown import shown

_MAX_FILE_BYTES = 1 << 28


class ChatError(RuntimeError):
    """A chat cannot do something; the message is one sentence. The conversation is unchanged."""


def _whole(text: str) -> int:
    return int(text, 10)


SETTINGS: dict[str, Callable[[str], int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": _whole,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": _whole,
    "seed": _whole,
}
"""Sampling settings that a command may change, with their parsers."""


@dataclass(frozen=True)
class Piece:
    """A piece of an answer's text; reasoning precedes the answer and is not part of it."""

    text: str
    reasoning: bool = False


@dataclass
class Reply:
    """An answer in progress: iterate over its pieces, or `close` it to stop; then its figures are final.

    Times are in seconds from the request; counts are tokens. completion_tokens is the number of pieces if the server
    does not report it. note: message for the user before the answer.
    """

    pieces: Iterator[Piece]
    note: str = ""
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    total_s: float = 0.0

    def __iter__(self) -> Iterator[Piece]:
        return self.pieces

    def close(self) -> None:
        """Stops the generation at its source; harmless after the end."""
        close = getattr(self.pieces, "close", None)
        if close is not None:
            close()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first; None below two tokens."""
        if self.first_s is None or self.completion_tokens < 2 or self.total_s <= self.first_s:
            return None
        return (self.completion_tokens - 1) / (self.total_s - self.first_s)


@dataclass
class Session:
    """A conversation. system: None for none. sampling: only values that differ from the model's defaults. raw: messages
    are pieces of one text that the model continues, without a chat template. first: index of the first message that is
    still sent; in a raw text, of its first character."""

    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    raw: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    saved_as: Path | None = None
    first: int = 0

    def request_messages(self, first: int | None = None) -> list[dict[str, str]]:
        """The messages for the chat template: the system message, then those from `first` on."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages[self.first if first is None else first :]

    def request_text(self, first: int | None = None) -> str:
        """The text that a raw completion continues: each question starts a line, each answer continues its
        question's."""
        text = ""
        for message in self.messages:
            starts_line = message["role"] == "user" and text and message["content"] and not text.endswith("\n")
            text += ("\n" if starts_line else "") + message["content"]
        return text[self.first if first is None else first :]

    def later_starts(self) -> list[int]:
        """Possible later values of `first`: questions, or words of a raw text."""
        if self.raw:
            words = re.finditer(r"\S+", self.request_text(first=0))
            return [word.start() for word in words if word.start() > self.first]
        return [i for i in range(self.first + 1, len(self.messages)) if self.messages[i]["role"] == "user"]

    def reset(self) -> None:
        """Starts over; keeps system message and settings."""
        self.messages.clear()
        self.first = 0

    def ask(self, text: str) -> None:
        """Adds a question; an empty one continues a raw text."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Adds an answer; an empty one removes the question."""
        if text or self.raw:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.drop_question()

    def drop_question(self) -> None:
        """Removes a question that has no answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def undo(self) -> str:
        """Removes the last question and its answer; returns the question. Raises ChatError if there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise ChatError("there is no question to take back: ask one first")
        question = self.messages[last]["content"]
        del self.messages[last:]
        if self.first >= (len(self.request_text(first=0)) if self.raw else len(self.messages)):
            # Dropped messages may fit again.
            self.first = 0
        return question

    def set(self, name: str, text: str) -> None:
        """Sets a number of SETTINGS from text; "default" restores the model's own. Raises ChatError."""
        if text == "default":
            self.sampling.pop(name, None)
            return
        try:
            value = SETTINGS[name](text)
        except ValueError:
            raise ChatError(f"{name} {shown(text)} is not a number: use one, or default for the model's own") from None
        sampling = {**self.sampling, name: value}
        check_sampling(sampling)
        self.sampling = sampling

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON, atomically. Refuses to replace a file that this chat did not write.

        Raises ChatError.
        """
        if path.exists() and (self.saved_as is None or not path.samefile(self.saved_as)):
            raise ChatError(f"{path} exists: name a new file")
        data = {
            "messages": self.request_messages(first=0),
            "sampling": {
                key: list(value) if isinstance(value, tuple) else value for key, value in self.sampling.items()
            },
            "raw": self.raw,
        }
        try:
            write_replaced(path, json.dumps(data, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise ChatError(f"cannot write {path}: {error.strerror or error}") from error
        self.saved_as = path

    def load(self, path: Path) -> None:
        """Loads a saved conversation, or a plain list of messages. Raises ChatError, and then changes nothing."""
        try:
            data = parse_json(read_regular(path, _MAX_FILE_BYTES))
        except OSError as error:
            raise ChatError(f"cannot read {path}: {error.strerror or error}") from error
        except JsonError as error:
            raise ChatError(f"{path} is not JSON of a conversation: {error}") from error
        if isinstance(data, list):
            data = {"messages": data}
        system, messages = _split_system(data.get("messages") if isinstance(data, Mapping) else None, path)
        sampling = data.get("sampling", self.sampling)
        known = {*SETTINGS, "stop"}
        if not isinstance(sampling, Mapping) or not known.issuperset(sampling):
            raise ChatError(
                f"sampling of {path} is {shown(sampling)}: use an object with some of {', '.join(sorted(known))}"
            )
        sampling = {key: tuple(value) if isinstance(value, list) else value for key, value in sampling.items()}
        check_sampling(sampling)
        raw = data.get("raw", self.raw)
        if raw is not self.raw:
            raise ChatError(
                f"{path} is a {'raw text' if raw else 'chat'}: start llmc chat {'with' if raw else 'without'} --raw"
            )
        self.system, self.messages, self.sampling, self.saved_as = system, messages, sampling, path
        self.first = 0


def _split_system(messages: Any, path: Path) -> tuple[str | None, list[dict[str, str]]]:
    if not isinstance(messages, list):
        raise ChatError(f"{path} has no list of messages: save one with /save")
    plain = []
    for index, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str) or (role == "system" and index):
            raise ChatError(
                f"message {index} of {path} does not do: give role user or assistant, system for the first only, and "
                "a text as content"
            )
        plain.append({"role": role, "content": content})
    if plain and plain[0]["role"] == "system":
        return plain[0]["content"], plain[1:]
    return None, plain


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises ChatError for a value out of range."""
    try:
        SamplingParams(**sampling)
    except (RequestError, TypeError) as error:
        raise ChatError(str(error)) from error
