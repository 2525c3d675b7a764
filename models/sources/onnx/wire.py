"""The bytes of an ONNX file without its weights: a protobuf whose large tensors stay in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmc.models.errors import ModelError

Buffer = memoryview
_BYTES = 2
"""The wire type of length-prefixed fields."""
# Field numbers of onnx.proto.
_GRAPH = 7
_INITIALIZER, _DOC, _VALUE_INFO = 5, 10, 13
_NAME, _RAW_DATA = 8, 9
_SMALL_BYTES = 1 << 12
"""Tensor data up to this size stays in the model."""
_MOST_BYTES = 256 << 20
"""Size limit of a model without large tensors, which becomes Python objects; real ones have a few MiB."""


class WireError(Exception):
    """Bytes that are not a protobuf; the message says why."""


@dataclass(frozen=True)
class Skeleton:
    """model: a ModelProto without large data. places: tensor name → (begin, end) in bytes."""

    model: bytes
    places: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Field:
    """number: of the field. begin: offset of its tag. value, end: its value, without the length for `_BYTES`."""

    number: int
    wire: int
    begin: int
    value: int
    end: int


def _varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """(number at an offset, offset of the next byte)."""
    number = shift = 0
    while at < end:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise WireError("a number has more than 64 bits")
    raise WireError("it ends within a number")


def _fields(data: Buffer, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        begin = at
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        value = at
        match wire:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 2:
                length, value = _varint(data, at, end)
                at = value + length
            case 5:
                at += 4
            case _:
                raise WireError(f"a field has the wire type {wire}")
        if number == 0 or at > end:
            raise WireError("a field ends behind what it is in" if number else "a field has the number 0")
        yield _Field(number, wire, begin, value, at)


def _tagged(number: int, parts: list[Buffer | bytes]) -> list[Buffer | bytes]:
    """A `_BYTES` field made of parts."""
    return [_encoded(number << 3 | _BYTES) + _encoded(sum(map(len, parts))), *parts]


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_skeleton(data: Buffer, origin: str) -> Skeleton:
    """Raises ModelError unless the data is a protobuf of a model."""
    try:
        places: dict[str, tuple[int, int]] = {}
        parts: list[Buffer | bytes] = []
        graphs = 0
        for field in _fields(data, 0, len(data)):
            if field.number == _GRAPH and field.wire == _BYTES:
                graphs += 1
                parts += _tagged(_GRAPH, _graph(data, field, places))
            else:
                parts.append(data[field.begin : field.end])
        if graphs != 1:
            raise WireError(f"it holds {graphs} graphs")
        size = sum(map(len, parts))
        if size > _MOST_BYTES:
            raise WireError(f"it has {size >> 20} MiB beside the raw data of its weights")
    except WireError as error:
        raise ModelError(
            f"{origin} is not an ONNX model, or a truncated one ({error}); download or export it again"
        ) from None
    return Skeleton(b"".join(parts), places)


def _graph(data: Buffer, graph: _Field, places: dict[str, tuple[int, int]]) -> list[Buffer | bytes]:
    parts: list[Buffer | bytes] = []
    for field in _fields(data, graph.value, graph.end):
        if field.wire == _BYTES and field.number == _INITIALIZER:
            parts += _tagged(_INITIALIZER, _tensor(data, field, places))
        elif field.number not in (_DOC, _VALUE_INFO):
            # Exporters' statements on intermediate values follow from the nodes.
            parts.append(data[field.begin : field.end])
    return parts


def _tensor(data: Buffer, tensor: _Field, places: dict[str, tuple[int, int]]) -> list[Buffer | bytes]:
    parts: list[Buffer | bytes] = []
    name, large = "", None
    for field in _fields(data, tensor.value, tensor.end):
        if field.wire == _BYTES and field.number == _NAME:
            name = bytes(data[field.value : field.end]).decode("utf-8", "replace")
        if field.wire == _BYTES and field.number == _RAW_DATA and field.end - field.value > _SMALL_BYTES:
            large = field.value, field.end
        else:
            parts.append(data[field.begin : field.end])
    if large is not None:
        if name in places:
            raise WireError("two tensors have one name")
        places[name] = large
    return parts
