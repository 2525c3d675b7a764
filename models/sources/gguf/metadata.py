"""Typed access to GGUF metadata: every invalid or missing value gives one clear sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.values import ArrayValue

_MAX_INTEGER = (1 << 31) - 1


class Metadata:
    """Values by key. origin: the file.

    Accessors raise ModelError for a value of wrong type or range, and for a missing one without a default. Accessed
    keys are remembered.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        self._read.add(key)
        return key in self._values

    def _get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def was_read(self, key: str) -> bool:
        """Whether the key was accessed."""
        return key in self._read

    def unread(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """(key, value) of keys with `prefix` never accessed; arrays in the form for errors."""
        for key, value in self._values.items():
            if key.startswith(prefix) and key not in self._read:
                yield key, value.brief() if isinstance(value, ArrayValue) else value

    def all_keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def wrong(self, key: str, expected: str) -> ModelError:
        value = self._values.get(key)
        shown = value.brief() if isinstance(value, ArrayValue) else brief(value)
        return ModelError(f"{self.origin}: metadata {key} is {shown} where {expected} was expected")

    def missing(self, key: str) -> ModelError:
        return ModelError(f"{self.origin} lacks the metadata {key}; take a file that a converter wrote whole")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        value = self._get(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def array(self, key: str) -> ArrayValue | None:
        value = self._get(key)
        if value is not None and not isinstance(value, ArrayValue):
            raise self.wrong(key, "an array")
        return value

    def is_array(self, key: str) -> bool:
        return isinstance(self._get(key), ArrayValue)

    def strings(self, key: str) -> list[str]:
        array = self.array(key)
        if array is None:
            raise self.missing(key)
        return array.strings()

    def flags(self, key: str) -> list[bool] | None:
        """A list of bools; None if there is no list."""
        value = self._get(key)
        if not isinstance(value, ArrayValue):
            return None
        return [bool(flag) for flag in value.flags()]

    def integers(self, key: str, count: int) -> list[int]:
        """An integer per layer, of `count` layers: an array, or one integer for all."""
        value = self._get(key)
        if not isinstance(value, ArrayValue):
            return [self.integer(key)] * count
        found = value.integers()
        if len(found) != count:
            raise self.wrong(key, f"a list of {count} integers")
        return [Metadata({key: one}, self.origin).integer(key) for one in found]

    def same_integer(self, key: str, default: int | None = None) -> int:
        """An integer, or an array that repeats one integer: values that could differ by layer but do not."""
        value = self._get(key, default)
        if not isinstance(value, ArrayValue):
            return self.integer(key, default)
        found = set(value.integers())
        if len(found) != 1:
            raise self.wrong(key, "one integer for all layers")
        (only,) = found
        return Metadata({key: only}, self.origin).integer(key)
