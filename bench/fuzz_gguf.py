"""Mutations of GGUF files as a faulty writer might make: wrong values, types, shapes and offsets."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Gguf,
    Value,
)  # fmt: skip
from llmc.compiler.store.artifact import copied_files
from llmc.models import load_parameters
from llmc.models.rope import checked_frequencies
from llmc.models.sources.gguf.source import GgufSource

_LARGEST = (1 << 64) - 1
# Bits of a number's largest value.
_BITS = {U8: 8, I8: 7, U16: 16, I16: 15, U32: 32, I32: 31, U64: 64, I64: 63, BOOL: 8}
_OTHERS = (
    Value(STRING, b"x"), Value(U32, 1), Value(F32, 1.0), Value(F64, 0.5), Value(BOOL, 1), Value(13, 0),
    Value(ARRAY, (U32, [1, 2])), Value(ARRAY, (STRING, [b"a"])), Value(ARRAY, (14, [])), Value(ARRAY, (F32, [])),
)  # fmt: skip


def read_gguf(path: Path) -> None:
    """Reads a file as a compilation does, down to every weight."""
    source = GgufSource(path)
    config = source.config()
    checkpoint = source.checkpoint()
    copied_files(source.model_files(), "auto")
    for parameter in load_parameters(config, checkpoint, "bf16"):
        parameter.value()
    checked_frequencies(config.rope, min(config.max_position_embeddings, 4096))


def mutated(model: Gguf, rng: random.Random) -> bytes:
    """The file with some items replaced, missing or doubled; sometimes cut off."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        model = _once(model, rng)
    changed = model.encoded()
    return changed[: rng.randrange(len(changed))] if rng.random() < 0.05 else changed


def _value(value: Value, rng: random.Random) -> Value:
    """Another value, mostly of the same type."""
    if rng.random() < 0.25:
        return rng.choice(_OTHERS)
    if value.type == ARRAY:
        element, values = value.data
        return _array(element, values, rng)
    if value.type in _BITS:
        bits = _BITS[value.type]
        number = rng.choice((0, 1, 2, 3, 7, 8, 64, (1 << bits) - 1, rng.getrandbits(bits)))
        return Value(value.type, number % (1 << bits))
    if value.type == STRING:
        return Value(STRING, rng.choice((b"", b"\xff", b"\x1b[2J", b"llama", b"yarn", b"x" * 3000, b"<0x0A>", b"a b")))
    return Value(value.type, rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30, 2.0)))


def _array(element: int, values: list[Any], rng: random.Random) -> Value:
    """The array with one element replaced, missing or doubled, or nested in another array."""
    kind = rng.random()
    if not values or kind < 0.1:
        deep = Value(ARRAY, (element, values))
        for _ in range(rng.choice((1, 2, 9))):
            deep = Value(ARRAY, (ARRAY, [deep.data]))
        return deep
    at, changed = rng.randrange(len(values)), list(values)
    if kind < 0.2:
        del changed[at]
    elif kind < 0.3:
        changed.insert(at, values[at])
    else:
        other = _value(Value(element, values[at]), rng)
        changed[at] = other.data if other.type == element else changed[0]
    return Value(ARRAY, (element, changed))


def _once(model: Gguf, rng: random.Random) -> Gguf:
    kind, at = rng.random(), rng.randrange(len(model.tensors))
    tensor = model.tensors[at]
    key, value = rng.choice(model.pairs)
    if kind < 0.5:
        return model.with_pair(key, None if rng.random() < 0.15 else _value(value, rng))
    if kind < 0.55:
        return replace(model, pairs=(*model.pairs, rng.choice(model.pairs)))
    if kind < 0.6:
        return replace(model, tensors=(*model.tensors, rng.choice(model.tensors)))
    if kind < 0.65:
        return replace(model, counts={rng.choice(("tensors", "pairs")): rng.choice((0, 1, 1 << 20, 1 << 60, _LARGEST))})
    if kind < 0.7:
        return replace(model, tensors=(*model.tensors[:at], *model.tensors[at + 1 :]))
    if kind < 0.8:
        sizes = list(tensor.dimensions)
        sizes[rng.randrange(len(sizes))] = rng.choice((0, 1, 31, 32, 64, 1 << 32, 1 << 62, _LARGEST))
        return model.with_tensor(at, dimensions=tuple(sizes) * rng.choice((1, 1, 1, 2, 3)))
    if kind < 0.88:
        return model.with_tensor(at, offset=rng.choice((0, 1, 32, 4096, 1 << 40, (1 << 64) - 32, _LARGEST)))
    if kind < 0.94:
        return model.with_tensor(at, type=rng.choice((0, 1, 2, 8, 12, 30, 39, 41, (1 << 32) - 1)))
    return model.with_tensor(at, name=rng.choice((b"", b"\xff", b"x" * 300, b"output.weight", b"blk.0.attn_q.bias")))
