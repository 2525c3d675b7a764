"""Stands in for the packages that llmc needs for packing a bundle, where a machine has only torch and numpy.

bf16 is a dtype of two bytes that `models/convert.py` reads by its bits. Schemas refuse nothing: the bundles are the
user's own, and the runtime checks what is made of them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

BF16 = np.dtype([("bits", np.uint16)])


def provide_missing() -> None:
    """Puts a module in the place of each package that is not installed. Call it before llmc is imported."""
    for name, content in {"ml_dtypes": {"bfloat16": BF16}, "pydantic": _PYDANTIC}.items():
        try:
            import_module(name)
        except ModuleNotFoundError:
            module = ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module


class _Schema:
    """In place of pydantic.BaseModel."""

    @classmethod
    def model_validate(cls, content: object) -> None:
        """Takes anything."""


class _TypeAdapter:
    """In place of pydantic.TypeAdapter."""

    def __init__(self, kind: object) -> None:
        self._kind = kind

    def validate_python(self, value: object) -> Any:
        return built(self._kind, value)


def _undecorated(**_: object) -> Callable[[Any], Any]:
    return lambda method: method


_PYDANTIC: dict[str, Any] = {
    "BaseModel": _Schema,
    "ConfigDict": dict,
    "Field": lambda **_: None,
    "TypeAdapter": _TypeAdapter,
    "ValidationError": ValueError,
    "model_validator": _undecorated,
}


def built(kind: Any, value: Any) -> Any:
    """A value of JSON as an object of type `kind`: dataclasses, tuples and floats are made, all else is taken as is."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(**{name: built(hints[name], one) for name, one in value.items()})
    if kind is float:
        return float(value)
    if get_origin(kind) is tuple:
        members = get_args(kind)
        each = members[:1] * len(value) if members[-1] is Ellipsis else members
        return tuple(built(one, part) for one, part in zip(each, value, strict=True))
    if get_origin(kind) in (Union, type(int | None)) and value is not None:
        (member,) = (one for one in get_args(kind) if one is not type(None))
        return built(member, value)
    return value
