"""Groups of options: shared by several commands as fields of a dataclass, or generated from fields of a config."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from llmc.cli.options.config_flags import ConfigFlags


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: replaces each parameter of `command` that is a group of options by one parameter per option.

    A group is annotated either with a dataclass whose fields are `Annotated[type, typer.Option(…)]`, or with
    `Annotated[dict[str, Any], ConfigFlags(…)]`.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, type | ConfigFlags] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        flags = next((one for one in getattr(hints[name], "__metadata__", ()) if isinstance(one, ConfigFlags)), None)
        if flags is not None:
            groups[name] = flags
            parameters += flags.parameters()
        elif is_dataclass(hints[name]):
            group: type = hints[name]
            groups[name] = group
            field_hints = typing.get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(field.name, kind, default=field.default, annotation=field_hints[field.name])
                for field in fields(group)
            ]
        else:
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        values = {name: _taken(group, given) for name, group in groups.items()}
        command(**given, **values)

    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(wrapper)["__signature__"] = inspect.Signature(parameters)  # what inspect.signature reads
    return wrapper


def _taken(group: type | ConfigFlags, given: dict[str, Any]) -> Any:
    """The value of a group; removes its options from `given`."""
    if isinstance(group, ConfigFlags):
        return group.take(given)
    return group(**{field.name: given.pop(field.name) for field in fields(group)})
