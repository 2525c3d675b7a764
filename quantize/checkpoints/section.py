"""Typed access to a checkpoint's quantization settings; a missing or invalid field gives a one-sentence error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.quantize.formats.base import QuantizeError
from llmc.shown import shown

MEND = "correct the checkpoint's config.json or download it again"
_MOST_TEXTS = 100_000
_MOST_SHOWN = 100


class Section:
    """The fields of one JSON object in the settings. origin: its name in errors. A null field counts as missing.

    Reading a missing field without a default raises QuantizeError.
    """

    def __init__(self, values: Any, origin: str) -> None:
        if not isinstance(values, Mapping):
            raise QuantizeError(f"{origin} is {shown(values)}, which is not an object; {MEND}")
        self.values = values
        self.origin = origin

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, expected: str) -> QuantizeError:
        return QuantizeError(f"{self.origin}: {name} is {shown(self.values.get(name))}, not {expected}; {MEND}")

    def _value(self, name: str, kind: type, expected: str) -> Any:
        value = self.values[name]
        if type(value) is not kind:
            raise self.wrong(name, expected)
        return value

    def _missing(self, name: str) -> QuantizeError:
        return QuantizeError(f"{self.origin} lacks {name}; {MEND}")

    def integer(self, name: str, default: int | None = None) -> int:
        if self.has(name):
            return int(self._value(name, int, "an integer"))
        if default is None:
            raise self._missing(name)
        return default

    def one_of(self, name: str, choices: tuple[int, ...], default: int | None = None) -> int:
        """An integer among `choices`."""
        value = self.integer(name, default)
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(map(str, choices))}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._value(name, bool, "true or false")) if self.has(name) else default

    def text(self, name: str, default: str | None = None) -> str:
        if self.has(name):
            return str(self._value(name, str, "a string"))
        if default is None:
            raise self._missing(name)
        return default

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """A string among `choices`, ignoring case."""
        value = self.text(name, default).lower()
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if missing."""
        if not self.has(name):
            return ()
        value = self._value(name, list, "a list of strings")
        if not all(isinstance(item, str) for item in value) or len(value) > _MOST_TEXTS:
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def table(self, name: str) -> Section:
        """A nested object; empty if missing."""
        plain = name if name.isprintable() and len(name) <= _MOST_SHOWN else shown(name)
        return Section(self.values[name] if self.has(name) else {}, f"{self.origin}: {plain}")
