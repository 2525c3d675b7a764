"""Options that several commands share, as the fields of one dataclass."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in place of each parameter annotated with a dataclass, an option for each field of it.

    A field is annotated as typer wants a parameter: `Annotated[type, typer.Option(…)]`.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))
            continue
        groups[name] = hints[name]
        field_hints = typing.get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(field.name, kind, default=field.default, annotation=field_hints[field.name])
            for field in fields(groups[name])
        ]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        values = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **values)

    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(wrapper)["__signature__"] = inspect.Signature(parameters)  # what inspect.signature reads
    return wrapper
