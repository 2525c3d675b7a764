"""Answers as JSON text. Small ones are encoded at once; large ones in another thread and in pieces, because each call
holds Python's lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from fastapi.responses import Response

from .lanes import Lanes

# About 50 µs of encoding.
_NODES = 512
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> bytes:
    """Compact JSON. Raises ValueError for a number that JSON does not have."""
    return _encode(value).encode()


async def json_of(lanes: Lanes, make: Callable[[], Any], size: int) -> bytes:
    """JSON text of what `make` returns. size: about how many tokens, alternatives and prompts it describes."""
    return await lanes.run(lambda: b"".join(pieces(make())), size)


async def json_response(lanes: Lanes, make: Callable[[], Any], size: int) -> Response:
    """An answer with what `make` returns. size: as for `json_of`."""
    return Response(await json_of(lanes, make, size), media_type="application/json")


def pieces(value: Any) -> Iterator[bytes]:
    """`to_json(value)` in parts, each quick to make."""
    if not isinstance(value, (dict, list, tuple)) or _num_nodes(value, _NODES) <= _NODES:
        yield to_json(value)
        return
    separator = b""
    if isinstance(value, dict):
        yield b"{"
        for key, item in value.items():
            yield separator + to_json(key) + b":"
            yield from pieces(item)
            separator = b","
        yield b"}"
        return
    yield b"["
    for run in _runs(value):
        yield separator
        if isinstance(run, _One):
            yield from pieces(run.value)
        else:
            yield to_json(run)[1:-1]
        separator = b","
    yield b"]"


class _One:
    """A large item of a list."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _runs(items: list[Any] | tuple[Any, ...]) -> Iterator[list[Any] | _One]:
    """The items in order: runs of small ones, and large ones alone."""
    run: list[Any] = []
    num_nodes = 0
    for item in items:
        nodes = _num_nodes(item, _NODES)
        if nodes > _NODES:
            if run:
                yield run
            run, num_nodes = [], 0
            yield _One(item)
            continue
        if num_nodes + nodes > _NODES and run:
            yield run
            run, num_nodes = [], 0
        run.append(item)
        num_nodes += nodes
    if run:
        yield run


def _num_nodes(value: Any, most: int) -> int:
    """Number of values in `value`, itself included; counting stops somewhere above `most`."""
    count, left = 0, [value]
    while left and count <= most:
        one = left.pop()
        count += 1
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, (list, tuple)):
            if len(one) > most:
                return most + 1
            left.extend(one)
        elif isinstance(one, str):
            count += len(one) >> 8
    return count
