"""Typed GGUF metadata values; arrays stay in the file until accessed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.models.brief import brief
from llmc.models.errors import ModelError

_AGAIN = "download the file again"
UINT32, STRING, ARRAY = 4, 8, 9
_SCALARS = {
    0: ("<B", "uint8"), 1: ("<b", "int8"), 2: ("<H", "uint16"), 3: ("<h", "int16"), 4: ("<I", "uint32"),
    5: ("<i", "int32"), 6: ("<f", "float32"), 7: ("<B", "bool"), 10: ("<Q", "uint64"), 11: ("<q", "int64"),
    12: ("<d", "float64"),
}  # fmt: skip
"""struct format and name, by code."""
_SIZES = {code: struct.calcsize(format) for code, (format, _) in _SCALARS.items()}
_FLOAT32, _BOOL = 6, 7
_MAX_DEPTH = 4
_MAX_KEY_BYTES = 256
# Arrays of strings are walked in Python; this exceeds any vocabulary's merges.
_MAX_STRINGS = 8_000_000


class Cursor:
    """Reads a mapped file from front to back; every length is checked against the remaining bytes."""

    def __init__(self, data: memoryview, origin: str) -> None:
        self.data, self.origin, self.at = data, origin, 0

    def broken(self, why: str) -> ModelError:
        return ModelError(f"{self.origin} is truncated or corrupt ({why}); {_AGAIN}")

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def number(self, format: str, what: str) -> Any:
        size = struct.calcsize(format)
        if size > self.left:
            raise self.broken(f"it ends in {what}, at byte {len(self.data)}")
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += size
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """A count of items of at least `least_bytes` each."""
        value: int = self.number("<Q", what)
        if value * least_bytes > self.left:
            raise self.broken(f"{what} is {value}, more than the {self.left} bytes behind it hold")
        return value

    def text(self, what: str, most_bytes: int | None = None) -> str:
        length = self.count(f"the length of {what}", 1)
        if most_bytes is not None and length > most_bytes:
            raise self.broken(f"the length of {what} is {length}, more than {most_bytes}")
        data = bytes(self.data[self.at : self.at + length])
        self.at += length
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.broken(f"{what} is {brief(data)}, which is not UTF-8") from None

    def key(self, number: int) -> str:
        return self.text(f"the name of metadata {number}", _MAX_KEY_BYTES)

    def value(self, key: str) -> Any:
        """A scalar, a string or an `ArrayValue`."""
        return self._typed(self.number("<I", f"the type of {key}"), key)

    def _typed(self, type: int, key: str) -> Any:
        if type in _SCALARS:
            value = self.number(_SCALARS[type][0], f"the value of {key}")
            if type == _FLOAT32:
                # The shortest decimal that rounds to it, which is what the authors wrote, such as 1e-6.
                return float(str(np.float32(value)))
            return bool(value) if type == _BOOL else value
        if type == STRING:
            return self.text(f"the value of {key}")
        if type == ARRAY:
            return self._array(key, 1)
        raise self.broken(f"metadata {brief(key)} has type {type}, which is not one of 0 to 12")

    def _array(self, key: str, depth: int) -> ArrayValue:
        if depth > _MAX_DEPTH:
            raise self.broken(f"the value of {key} is nested deeper than {_MAX_DEPTH} arrays")
        type = self.number("<I", f"the element type of {key}")
        what = f"the length of {key}"
        if type in _SCALARS:
            count = self.count(what, _SIZES[type])
            begin, self.at = self.at, self.at + count * _SIZES[type]
        elif type == STRING:
            count = self.count(what, 8)
            if count > _MAX_STRINGS:
                raise self.broken(f"{what} is {count}, more than {_MAX_STRINGS}")
            begin = self.at
            self._skip_strings(count, key)
        elif type == ARRAY:
            count = self.count(what, 12)
            begin = self.at
            for _ in range(count):
                self._array(key, depth + 1)
        else:
            raise self.broken(f"metadata {brief(key)} is an array of type {type}, which is not one of 0 to 12")
        return ArrayValue(self, key, type, count, begin, self.at)

    def _skip_strings(self, count: int, key: str) -> None:
        data, at, end = self.data, self.at, len(self.data)
        for index in range(count):
            length = int.from_bytes(data[at : at + 8], "little")
            at += 8 + length
            if at > end:
                raise self.broken(f"element {index} of {key} ends at byte {at} of {end}")
        self.at = at


@dataclass(frozen=True)
class ArrayValue:
    """A metadata array. type: of elements, by code. begin, end: its bytes in the file."""

    source: Cursor
    key: str
    type: int
    count: int
    begin: int
    end: int

    def _wrong(self, expected: str) -> ModelError:
        kind = {STRING: "string", ARRAY: "array"}.get(self.type) or _SCALARS[self.type][1]
        return ModelError(
            f"{self.source.origin}: {self.key} is an array of {kind} where {expected} were expected; {_AGAIN}"
        )

    def strings(self) -> list[str]:
        if self.type != STRING:
            raise self._wrong("strings")
        data, at, found = bytes(self.source.data[self.begin : self.end]), 0, []
        for index in range(self.count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self.source.broken(
                    f"element {index} of {self.key} is {brief(data[start:at])}, which is not UTF-8"
                ) from None
        return found

    def numbers(self) -> list[Any]:
        """Integers or floats, as Python numbers."""
        if self.type not in _SCALARS or self.type == _BOOL:
            raise self._wrong("numbers")
        format = np.dtype(_SCALARS[self.type][0])
        values: list[Any] = np.frombuffer(self.source.data[self.begin : self.end], format).tolist()
        return values

    def flags(self) -> list[int]:
        """Bools, or integers used as such."""
        if self.type in (_FLOAT32, 12) or self.type not in _SCALARS:
            raise self._wrong("true or false")
        values: list[int] = np.frombuffer(
            self.source.data[self.begin : self.end], np.dtype(_SCALARS[self.type][0])
        ).tolist()
        return values

    def integers(self) -> list[int]:
        if self.type in (6, 12):
            raise self._wrong("integers")
        return self.numbers()

    def brief(self) -> str:
        return f"an array of {self.count}"
