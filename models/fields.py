"""Typed reading of a JSON object: every invalid or missing field gives one clear sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.files import read_file
from llmc.regular_file import JsonError, parse_json

_MAX_BYTES = 4 << 20  # real configs have a few KiB; up to 3 MiB if they list every quantized module
_MAX_INTEGER = (1 << 31) - 1
# Models compute in float32; values beyond its range would become infinity or zero.
_LEAST_FLOAT, _LARGEST_FLOAT = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


class Fields:
    """The fields of one JSON object. origin: its name in errors, a path or `path: key`.

    A null field counts as missing. Accessors raise ModelError for a missing field without a default, and for a value of
    wrong type or range. Accessed fields are remembered; `unread` yields the others.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin
        self._read: set[str] = set()
        self._tables: dict[str, Fields] = {}
        self._names = {name: name for name in values}

    @classmethod
    def read(cls, path: Path, most_bytes: int = _MAX_BYTES) -> Fields:
        """Reads a JSON file of a checkpoint, which must hold one object."""
        try:
            values = parse_json(read_file(path, most_bytes), infinity=True)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; pass the directory of a Hugging Face checkpoint") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}; download it again") from error
        except JsonError as error:
            raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds a JSON {type(values).__name__} where an object was expected")
        return cls(values, str(path))

    def renamed(self, **theirs: str) -> Fields:
        """The same object with aliases: `theirs` maps our names to the object's.

        Where both names are present, ours is taken. Theirs then counts as read if it states the same.
        """
        self._read.update(
            their
            for name, their in theirs.items()
            if their in self._values and name in self._values and self._values[their] == self._values[name]
        )
        ours = {name: self._values[their] for name, their in theirs.items() if their in self._values}
        return self._derived({**ours, **self._values}, {**{name: theirs[name] for name in ours}, **self._names})

    def with_values(self, **values: Any) -> Fields:
        """The same object with some values replaced; the originals do not count as read."""
        names = {name: theirs for name, theirs in self._names.items() if name not in values}
        return self._derived({**self._values, **values}, names)

    def _derived(self, values: Mapping[str, Any], names: dict[str, str]) -> Fields:
        """The same object with other values. names: our aliases."""
        derived = Fields(values, self.origin)
        derived._read, derived._tables, derived._names = self._read, self._tables, names
        return derived

    def _get(self, name: str) -> Any:
        """The value, or None; marks the field as read."""
        if name in self._names:
            self._read.add(self._names[name])
        return self._values.get(name)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of fields never accessed, null ones omitted; for an accessed object its own fields, as
        `rope_scaling.factor`."""
        for name, value in self._values.items():
            if value is not None and name not in self._read:
                yield name, value
        for name, table in self._tables.items():
            for inner, value in table.unread():
                yield f"{name}.{inner}", value

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._get(name) is not None

    @property
    def values(self) -> Mapping[str, Any]:
        """All of them."""
        return self._values

    def mentions(self, name: str) -> bool:
        """Whether the field is present, even if null."""
        self._get(name)
        return name in self._values

    def raw(self, name: str, default: Any = REQUIRED) -> Any:
        """The value, unconverted."""
        value = self._get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"{self.origin} lacks the field {name!r}")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.origin}: field {name!r} is {brief(value)} where {expected} was expected")

    def integer(self, name: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(name, value, f"an integer of at least {minimum}")
        if value > maximum:
            raise self._wrong(name, value, f"an integer of at most {maximum}")
        return value

    def number(self, name: str, default: Any = REQUIRED, positive: bool = True) -> float:
        """A number within float32's range, positive by default."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        if positive and value <= 0:
            raise self._wrong(name, value, "a positive number")
        # Also false for NaN.
        if not (_LEAST_FLOAT <= abs(value) <= _LARGEST_FLOAT or value == 0):
            raise self._wrong(name, value, "a number in the range of float32")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number of any sign; None if missing."""
        return self.number(name, positive=False) if self.has(name) else None

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """A list of exactly `count` strings."""
        value = self.raw(name)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, str) for v in value):
            raise self._wrong(name, value, f"a list of {count} strings")
        return tuple(value)

    def integers(self, name: str, count: int | None = None) -> tuple[int, ...]:
        """A list of non-negative integers, exactly `count` unless None."""
        value = self.raw(name)
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self._wrong(name, value, "a list of integers" if count is None else f"a list of {count} integers")
        entries = Fields({str(i): number for i, number in enumerate(value)}, f"{self.origin}: {name}")
        return tuple(entries.integer(str(i), minimum=0) for i in range(len(value)))

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` positive numbers."""
        value = self.raw(name)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(name, value, f"a list of {count} numbers")
        entries = Fields({str(i): number for i, number in enumerate(value)}, f"{self.origin}: {name}")
        return tuple(entries.number(str(i)) for i in range(count))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if missing."""
        value = self.raw(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self._wrong(name, value, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def table(self, name: str) -> Fields | None:
        """A nested object; None if missing."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return self._tables.setdefault(name, Fields(value, f"{self.origin}: {name}"))

    def nested_names(self) -> tuple[str, ...]:
        """Names of fields that are objects."""
        return tuple(name for name, value in self._values.items() if isinstance(value, dict))
