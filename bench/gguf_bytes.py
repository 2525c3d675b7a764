"""Writes GGUF files byte by byte, valid or not, and a small valid model: for tests and fuzzing. Needs only numpy."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q",
            I64: "<q", F64: "<d"}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A metadata value. type: numbered above. data: number, string's bytes, or (element type, values) of an array."""

    type: int
    data: Any


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry. dimensions: columns first. offset: in bytes; None: behind the tensor before it, aligned."""

    name: bytes
    dimensions: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class Gguf:
    """A file. counts: numbers of tensors and of metadata to write if they are to be wrong."""

    pairs: tuple[tuple[bytes, Value], ...]
    tensors: tuple[TensorInfo, ...]
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    counts: Mapping[str, int] = field(default_factory=dict)

    def with_pair(self, key: bytes, value: Value | None) -> Gguf:
        """The file with another value of a key; None removes it, a new key comes last."""
        rest = [pair for pair in self.pairs if pair[0] != key or value is not None]
        changed = [(key, value) if pair[0] == key and value is not None else pair for pair in rest]
        if value is not None and all(pair[0] != key for pair in changed):
            changed.append((key, value))
        return replace(self, pairs=tuple(changed))

    def with_tensor(self, index: int, **fields: Any) -> Gguf:
        tensors = list(self.tensors)
        tensors[index] = replace(tensors[index], **fields)
        return replace(self, tensors=tuple(tensors))

    def encoded(self) -> bytes:
        out = bytearray(self.magic + struct.pack("<I", self.version))
        out += struct.pack("<Q", self.counts.get("tensors", len(self.tensors)))
        out += struct.pack("<Q", self.counts.get("pairs", len(self.pairs)))
        for key, value in self.pairs:
            out += _string(key) + struct.pack("<I", value.type) + _value(value.type, value.data)
        data = bytearray()
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            out += _string(tensor.name) + struct.pack("<I", len(tensor.dimensions))
            out += b"".join(struct.pack("<Q", size) for size in tensor.dimensions)
            out += struct.pack("<IQ", tensor.type, offset)
            data += tensor.data
        return bytes(out) + bytes(-len(out) % self.alignment) + bytes(data)


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _value(type: int, data: Any) -> bytes:
    if type == STRING:
        return _string(data)
    if type == ARRAY:
        element, values = data
        return struct.pack("<IQ", element, len(values)) + b"".join(_value(element, value) for value in values)
    if type not in _FORMATS:
        return b""
    return struct.pack(_FORMATS[type], data)


def strings(values: Sequence[str]) -> Value:
    return Value(ARRAY, (STRING, [value.encode() for value in values]))


def small_model(tokenizer: str = "gpt2") -> Gguf:
    """A llama of one layer with a tokenizer, "gpt2" or "llama"."""
    pairs: dict[str, Value] = {
        "general.architecture": Value(STRING, b"llama"),
        "general.name": Value(STRING, b"small"),
        "llama.context_length": Value(U32, 64),
        "llama.embedding_length": Value(U32, 32),
        "llama.block_count": Value(U32, 1),
        "llama.feed_forward_length": Value(U32, 64),
        "llama.attention.head_count": Value(U32, 2),
        "llama.attention.head_count_kv": Value(U32, 1),
        "llama.attention.layer_norm_rms_epsilon": Value(F32, 1e-5),
        "llama.rope.dimension_count": Value(U32, 16),
        "llama.rope.freq_base": Value(F32, 10000.0),
        "llama.rope.scaling.type": Value(STRING, b"linear"),
        "llama.rope.scaling.factor": Value(F32, 2.0),
        "general.tags": strings(["text-generation"]),
        "tokenizer.ggml.model": Value(STRING, tokenizer.encode()),
        "tokenizer.ggml.pre": Value(STRING, b"llama-bpe"),
        **(_byte_level() if tokenizer == "gpt2" else _pieces()),
        "tokenizer.ggml.bos_token_id": Value(U32, 1),
        "tokenizer.ggml.eos_token_id": Value(U32, 2),
        "tokenizer.ggml.add_bos_token": Value(BOOL, 1),
        "tokenizer.chat_template": Value(STRING, b"{% for m in messages %}{{ m.content }}{% endfor %}"),
    }
    rng = np.random.default_rng(0)

    def floats(name: str, *shape: int) -> TensorInfo:
        data = rng.standard_normal(shape[::-1]).astype(np.float32).tobytes()
        return TensorInfo(name.encode(), shape, 0, data)

    def eight_bits(name: str, columns: int, rows: int) -> TensorInfo:
        blocks = rng.integers(0, 256, (rows * columns // 32, 34), dtype=np.uint8)
        blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        return TensorInfo(name.encode(), (columns, rows), 8, blocks.tobytes())

    vocabulary = len(pairs["tokenizer.ggml.tokens"].data[1])
    return Gguf(
        tuple((key.encode(), value) for key, value in pairs.items()),
        (
            eight_bits("token_embd.weight", 32, vocabulary),
            floats("blk.0.attn_norm.weight", 32),
            eight_bits("blk.0.attn_q.weight", 32, 32),
            eight_bits("blk.0.attn_k.weight", 32, 16),
            floats("blk.0.attn_v.weight", 32, 16),
            eight_bits("blk.0.attn_output.weight", 32, 32),
            floats("blk.0.ffn_norm.weight", 32),
            eight_bits("blk.0.ffn_gate.weight", 32, 64),
            floats("blk.0.ffn_up.weight", 32, 64),
            eight_bits("blk.0.ffn_down.weight", 64, 32),
            floats("output_norm.weight", 32),
            TensorInfo(b"rope_freqs.weight", (8,), 0, np.ones(8, np.float32).tobytes()),
        ),
    )


def _byte_level() -> dict[str, Value]:
    return {
        "tokenizer.ggml.tokens": strings(["a", "<s>", "</s>", "b", "ab", "\u0120", "\u0120ab", "[PAD7]"]),
        "tokenizer.ggml.token_type": Value(ARRAY, (I32, [1, 3, 3, 1, 1, 1, 1, 5])),
        "tokenizer.ggml.merges": strings(["a b", "\u0120 ab"]),
    }


def _pieces() -> dict[str, Value]:
    return {
        "tokenizer.ggml.tokens": strings(["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "<0x0A>"]),
        "tokenizer.ggml.token_type": Value(ARRAY, (I32, [2, 3, 3, 1, 1, 1, 1, 6])),
        "tokenizer.ggml.scores": Value(ARRAY, (F32, [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -0.5, 0.0])),
    }
