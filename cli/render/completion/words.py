"""Words of the command line (commands, options and value kinds), read from the parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .known_values import known_values


class Value(StrEnum):
    """Kind of completion that a shell offers for a value."""

    NONE = "none"
    """No completion: numbers and texts."""
    CHOICES = "choices"
    FILE = "file"
    FOLDER = "folder"
    ARTIFACT = "artifact"
    """Folders; one with graphs.bin is final."""
    MODEL = "model"
    """Artifacts, other folders and files: a GGUF or ONNX file is a model, too."""


@dataclass(frozen=True)
class Option:
    """names: as typed, such as `-o` and `--output`. value: None for a switch."""

    names: tuple[str, ...]
    help: str
    value: Value | None
    choices: tuple[str, ...] = ()
    multiple: bool = False


@dataclass(frozen=True)
class CommandWords:
    """path: preceding words, as ("cache", "ls"). arguments: kind of each positional value; if `repeats`, the last kind
    applies to all that follow."""

    path: tuple[str, ...]
    help: str
    children: tuple[str, ...]
    options: tuple[Option, ...]
    arguments: tuple[tuple[Value, tuple[str, ...]], ...]
    repeats: bool


# By the name of a value in the help.
_BY_NAME = {
    "DIR": Value.FOLDER,
    "ARTIFACT": Value.ARTIFACT,
    "ARTIFACT|MODEL": Value.MODEL,
    "MODEL": Value.MODEL,
    "URL|ARTIFACT|MODEL": Value.MODEL,
    "SPEC|FILE|ARTIFACT": Value.MODEL,
}
# A last word in capitals stands for other values.
_CHOICES = re.compile(r"[a-z_0-9]+(\|[a-z_0-9]+)+(\|[A-Z]+)?")


def command_words(command: Any, path: tuple[str, ...] = ()) -> Iterator[CommandWords]:
    """`command` and everything below it, the root first."""
    children = getattr(command, "commands", {})
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [_option(param, path) for param in params if param.param_type_name == "option"]
    yield CommandWords(
        path=path,
        help=(command.short_help or "").strip(),
        children=tuple(children),
        options=(*options, Option(("-h", "--help"), "Show the help and exit.", None)),
        arguments=tuple(_value(param, path) for param in arguments),
        repeats=bool(arguments) and arguments[-1].nargs == -1,
    )
    for name, child in children.items():
        yield from command_words(child, (*path, name))


def _option(param: Any, path: tuple[str, ...]) -> Option:
    names = (*param.opts, *param.secondary_opts)
    text = " ".join((param.help or "").split())
    if param.is_flag:
        return Option(names, text, None)
    value, choices = _value(param, path)
    return Option(names, text, value, choices, bool(param.multiple))


def _value(param: Any, path: tuple[str, ...]) -> tuple[Value, tuple[str, ...]]:
    choices = getattr(param.type, "choices", None)
    if choices is not None:
        return Value.CHOICES, tuple(str(getattr(choice, "value", choice)) for choice in choices)
    known = known_values(path, param.opts)
    if known:
        return Value.CHOICES, known
    name = (param.metavar or "").removesuffix("…")
    if _CHOICES.fullmatch(name):
        return Value.CHOICES, tuple(word for word in name.split("|") if word.islower())
    if name in _BY_NAME:
        return _BY_NAME[name], ()
    is_path = param.type.name == "path" or "FILE" in name.split("|")
    return (Value.FILE if is_path else Value.NONE), ()
