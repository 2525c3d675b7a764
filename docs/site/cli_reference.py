"""The command line's reference: every command, its options, their defaults and its examples, from the application."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from llmc.cli.main import HEADINGS, build_app

from .markdown import cell, code, heading, prose, table

_EXAMPLES = "Examples:"


def page() -> str:
    """The page, in Markdown."""
    app = typer.main.get_command(build_app())
    parts = [
        "# Command line",
        "Every command takes `--help`. `llmc --version` shows the version, and `--debug` the traceback of an error. "
        "Exit codes: 0, 1 for a failure, 2 for wrong usage, 130 when interrupted.",
    ]
    for name, command in commands(app):
        parts += [heading(2, f"llmc {name}"), *_described(name, command)]
    return "\n\n".join(parts) + "\n"


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its name, as "cache ls", in the order of the help; groups themselves are left out."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _described(name: str, command: Any) -> Iterator[str]:
    text, _, examples = inspect.cleandoc(command.help or "").replace("\b", "").partition(_EXAMPLES)
    yield prose(text.strip())
    if examples.strip():
        yield f"```sh\n{inspect.cleandoc(examples)}\n```"
    titles = HEADINGS.get(name, {})
    title_of = {param: title for title, params in titles.items() for param in params}
    rows: dict[str, list[list[str]]] = {"Arguments": [], **{title: [] for title in titles}, "Options": []}
    for param in command.params:
        if getattr(param, "hidden", False) or param.name == "help":
            continue
        argument = param.param_type_name == "argument"
        title = "Arguments" if argument else title_of.get(param.name, "Options")
        rows[title].append(
            [_spelled(param), _default(param), " ".join([cell(param.help or ""), *_bounds(param)]).strip()]
        )
    for title, of_title in rows.items():
        if of_title:
            yield table([title, "default", ""], of_title)


def _spelled(param: Any) -> str:
    """`--port N`, or both names of a switch."""
    if param.param_type_name == "argument":
        return code(param.metavar)
    value = "" if param.is_flag else f" {param.metavar}"
    return ", ".join(code(f"{name}{value}") for name in [*param.opts, *param.secondary_opts])


def _bounds(param: Any) -> Iterator[str]:
    """The least and the largest value, and the environment variable that is the default."""
    for name, sign in (("min", "≥"), ("max", "≤")):
        if (bound := getattr(param.type, name, None)) is not None:
            yield code(f"{sign} {bound}")
    variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    yield from (f"Also from {code(variable)}." for variable in variables)


def _default(param: Any) -> str:
    if param.required:
        return "required"
    shown: Any = param.show_default if isinstance(param.show_default, str) else param.default
    if getattr(param, "is_flag", False):
        return {True: "on", False: "off"}.get(shown, "")
    values = shown if isinstance(shown, (list, tuple)) else [] if shown is None else [shown]
    return ", ".join(code(str(getattr(value, "value", value))) for value in values)
