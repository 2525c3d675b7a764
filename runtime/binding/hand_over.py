"""KV blocks of a text that go from one engine to another. Imports neither torch nor tvm."""

from __future__ import annotations

from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from llmc.runtime.binding import abi
from llmc.runtime.binding.engine import Engine
from llmc.runtime.binding.handle import Handle, IntArray, call, int32

HEADER_BYTES = 64
"""Bytes before the blocks of a part."""
_NUM_BLOCKS_AT = 36
Octets = bytes | bytearray | memoryview


def least_part_bytes(engine: Engine) -> int:
    """Bytes of a part with one block, and with states if the model has some."""
    return HEADER_BYTES + engine.handed_block_bytes + engine.handed_state_bytes


def blocks_of_part(data: Octets) -> int:
    """How many blocks a part says that it has; 0 if it is shorter than a header. `check` tells whether it has them."""
    return int.from_bytes(data[_NUM_BLOCKS_AT : _NUM_BLOCKS_AT + 4], "little") if len(data) >= HEADER_BYTES else 0


@dataclass(frozen=True)
class HandedBlocks:
    """Blocks on their way to another engine. data: as llmc_hand_over_export wrote it."""

    num_blocks: int
    data: memoryview


class HandedText(Handle):
    """A text whose KV blocks are handed over in parts; it remembers where the last part ended.

    Use it from one thread at a time; `seal` and `check` may run beside others. `num_cached`, `export` and `enter` wait
    for a step, and steps wait for them. Methods raise LlmcError, and ValueError when the engine is closed.
    """

    _destroy = "llmc_hand_over_destroy"

    def __init__(self, engine: Engine, token_ids: IntArray) -> None:
        """Copies the tokens. Raises LlmcError if the engine has no prefix cache."""
        super().__init__()
        self._engine = engine
        tokens, pointer = int32("token_ids", token_ids), c_void_p()
        more = max(1, tokens.size // engine.block_size) - 1
        self._most_bytes = least_part_bytes(engine) + more * engine.handed_block_bytes
        ids = tokens.ctypes.data_as(abi.I32P)
        call("llmc_hand_over_create", engine.pointer, ids, tokens.size, byref(pointer))
        self._pointer = pointer

    @property
    def pointer(self) -> c_void_p:
        _ = self._engine.pointer  # an engine that is closed must not be used
        return super().pointer

    def num_cached(self) -> int:
        """Leading whole blocks that the prefix cache holds; where a model has states, up to the last one with them."""
        num_blocks = c_uint64()
        call("llmc_hand_over_count", self.pointer, byref(num_blocks))
        return num_blocks.value

    def export(self, first_block: int = 0, max_bytes: int = 2**62, into: memoryview | None = None) -> HandedBlocks:
        """Cached blocks from first_block on, not sealed: at most max_bytes, and at least one if any is cached.

        into: memory for them, of any size that holds a block, in place of max_bytes.
        """
        least = least_part_bytes(self._engine)
        if into is None:
            room = np.empty(min(self._most_bytes, max(max_bytes, least)), np.uint8)
        else:
            room = np.frombuffer(into, np.uint8)
        num_blocks, num_bytes = c_uint64(), c_uint64()
        out = room.ctypes.data_as(c_void_p)
        call(
            "llmc_hand_over_export",
            *(self.pointer, first_block, out, room.size, byref(num_blocks), byref(num_bytes)),
        )
        return HandedBlocks(num_blocks.value, room.data[: num_bytes.value])

    def seal(self, blocks: HandedBlocks) -> None:
        """Writes the checksums, which the other engine's side checks."""
        call("llmc_hand_over_seal", self.pointer, *_bytes(blocks.data))

    def check(self, data: Octets) -> None:
        """Raises LlmcError for blocks that are damaged, or of another text or artifact."""
        call("llmc_hand_over_check", self.pointer, *_bytes(data))

    def enter(self, data: Octets) -> int:
        """Enters blocks that `check` found good into the prefix cache.

        Returns how many leading blocks of the text are cached then; fewer than given if no more are free, or if earlier
        ones are missing. A request with that text has the bits that it would have without.
        """
        num_blocks = c_uint64()
        call("llmc_hand_over_import", self.pointer, *_bytes(data), byref(num_blocks))
        return num_blocks.value


def _bytes(data: Octets) -> tuple[c_void_p | None, int]:
    """Address and size. The caller keeps the data alive."""
    return (c_void_p(np.frombuffer(data, np.uint8).ctypes.data), len(data)) if data else (None, 0)
