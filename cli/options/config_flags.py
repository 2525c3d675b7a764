"""Flags that are fields of a config: each is declared once, with the field's own type and default."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter
from typing import Annotated, Any

import typer

from llmc.units import parse_size

_THE_FIELD_S = object()


class Flag:
    """How a field is given on the command line.

    spellings: of the flag, where they are not made of its name. name: the flag's as a parameter; empty: the field's.
    default, given: as it is typed, and the type of that, where they are not the field's. read: makes the field's value
    of it; may raise typer.BadParameter. size: it is a text such as 2GiB, the field bytes. option: what `typer.Option`
    takes besides.
    """

    def __init__(
        self,
        help: str,
        *spellings: str,
        name: str = "",
        default: Any = _THE_FIELD_S,
        given: Any = None,
        read: Callable[[Any], Any] | None = None,
        size: bool = False,
        **option: Any,
    ) -> None:
        self.name, self.default, self.given, self.read, self.size = name, default, given, read, size
        self.option = typer.Option(*spellings, help=help, **option)


class ConfigFlags:
    """Flags for fields of a config, which is a dataclass.

    A command annotates a parameter with this (`group.takes_option_groups`), and gets a dictionary of values by field.
    """

    def __init__(self, config: type, **flags: Flag) -> None:
        hints, self._flags = typing.get_type_hints(config), {}
        by_name = {field.name: field for field in fields(config)}
        for field_name, flag in flags.items():
            field = by_name[field_name]
            kind, default, read = _as_typed(hints[field_name], None if field.default is MISSING else field.default)
            if flag.size:
                kind, default, read = str, _text_of(default), parse_size
            kind, read = flag.given or kind, flag.read or read
            default = default if flag.default is _THE_FIELD_S else flag.default
            name = flag.name or field_name
            parameter = Parameter(
                name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag.option]
            )
            self._flags[field_name] = parameter, read

    def parameters(self) -> list[Parameter]:
        """The flags as parameters for typer."""
        return [parameter for parameter, _ in self._flags.values()]

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Removes the flags from `given`, and returns values by field. Raises typer.BadParameter."""
        return {field: read(given.pop(parameter.name)) for field, (parameter, read) in self._flags.items()}


def _as_typed(kind: Any, default: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """(type, default, parser) of a field on the command line; the parser gives the field's value."""
    if typing.get_origin(kind) is tuple:
        return list[str], list(default), tuple
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and type(None) in typing.get_args(kind):
        if float in typing.get_args(kind):  # 0: no limit
            return float, default or 0.0, lambda value: value or None
        return kind, default, lambda value: value or None
    return kind, default, lambda value: value


def _text_of(size: int) -> str:
    """1 << 20 → "1MiB"."""
    unit = next((unit for unit in (30, 20, 10) if size and size % (1 << unit) == 0), 0)
    return f"{size >> unit}{ {30: 'GiB', 20: 'MiB', 10: 'KiB', 0: ''}[unit] }"
