"""Commands in a chat: lines that start with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.runtime.chat.session import SETTINGS, ChatError, Reply, Session

HELP = """/system [TEXT]       show, set, or with "" clear the system message
/temperature [X]     likewise /top-p, /top-k, /min-p, /max-tokens, /seed, /repetition-penalty,
                     /presence-penalty and /frequency-penalty: show, set, or with "default" leave to the model
/retry               answer the last question again (with a seed: the same answer)
/undo                take back the last question and its answer
/reset               start over; system message and settings stay
/save FILE           write the conversation as JSON
/load FILE           go on with a saved conversation
/stats               tokens, time to the first token and tokens per second
/help                this text
/quit                leave (as Ctrl-D does); Ctrl-C stops an answer
A line of three quotes starts and ends a message of several lines; a message may start with a slash if it is doubled."""


@dataclass(frozen=True)
class Outcome:
    """The effect of a line. say: a note to show. ask: a question to answer. leave: end the chat."""

    say: str = ""
    ask: str | None = None
    leave: bool = False


class Commands:
    """Reads the lines of a chat, and applies commands to its session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Reply | None = None
        self._num_answers = self._num_tokens = 0
        self._table: dict[str, Callable[[str], Outcome]] = {
            "system": self._system,
            "retry": self._retry,
            "undo": self._undo,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
            "help": lambda argument: Outcome(say=HELP),
            "quit": lambda argument: Outcome(leave=True),
            "exit": lambda argument: Outcome(leave=True),
        }

    @property
    def names(self) -> list[str]:
        """All commands with their slash, for completion."""
        return sorted(f"/{name}" for name in [*self._table, *(setting.replace("_", "-") for setting in SETTINGS)])

    def take(self, line: str) -> Outcome:
        """Handles a line of input. Raises ChatError, and then changes nothing."""
        if not line.startswith("/"):
            return Outcome(ask=line)
        if line.startswith("//"):
            return Outcome(ask=line[1:])
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        setting = name.replace("-", "_")
        if setting in SETTINGS:
            return self._setting(setting, argument)
        if name not in self._table:
            raise ChatError(f"the command /{name} is unknown: /help lists all; a message may start with //")
        return self._table[name](argument)

    def count(self, reply: Reply) -> None:
        """Adds an answer to the statistics."""
        self._last = reply
        self._num_answers += 1
        self._num_tokens += reply.completion_tokens

    def _setting(self, name: str, argument: str) -> Outcome:
        if argument:
            self._session.set(name, argument)
        value = self._session.sampling.get(name)
        return Outcome(say=f"{name} {value}" if value is not None else f"{name} is the model's own")

    def _system(self, argument: str) -> Outcome:
        if self._session.raw:
            raise ChatError("a raw text has no system message: start llmc chat without --raw")
        if argument:
            self._session.system = None if argument in ('""', "''") else argument
        system = self._session.system
        return Outcome(say="no system message" if system is None else f"system message: {system}")

    def _retry(self, argument: str) -> Outcome:
        return Outcome(ask=self._session.undo())

    def _undo(self, argument: str) -> Outcome:
        return Outcome(say=f"took back: {self._session.undo()}")

    def _reset(self, argument: str) -> Outcome:
        self._session.reset()
        return Outcome(say="started over")

    def _save(self, argument: str) -> Outcome:
        path = _path(argument, "save")
        self._session.save(path)
        return Outcome(say=f"wrote {path}")

    def _load(self, argument: str) -> Outcome:
        self._session.load(_path(argument, "load"))
        num = len(self._session.messages)
        return Outcome(say=f"read {argument}: {num} message{'' if num == 1 else 's'}")

    def _stats(self, argument: str) -> Outcome:
        if self._last is None:
            return Outcome(say="no answer yet")
        total = f"{self._num_answers} answer{'' if self._num_answers == 1 else 's'}, {self._num_tokens} tokens in all"
        return Outcome(say=f"{describe(self._last)}\n{total}")


def describe(reply: Reply) -> str:
    """One line of figures about an answer."""
    parts = []
    if reply.prompt_tokens is not None:
        cached = f" ({reply.cached_tokens} cached)" if reply.cached_tokens else ""
        parts.append(f"prompt {reply.prompt_tokens} tokens{cached}")
    parts.append(f"answer {reply.completion_tokens} tokens")
    if reply.first_s is not None:
        parts.append(f"first token {reply.first_s * 1e3:.0f} ms")
    if (rate := reply.tokens_per_s) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if reply.finish_reason == "length":
        parts.append("ended by the limit of tokens")
    return ", ".join(parts)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ChatError(f"/{command} needs a file: /{command} talk.json")
    return Path(argument).expanduser()
