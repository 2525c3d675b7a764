"""Memory that a draft takes from its model's budget: weights, memory its graphs share, and a second KV cache."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from llmc.runtime.binding import ArtifactInfo


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes. weights, graphs: taken whatever is served. kv_block: a KV block of block_size tokens."""

    weights: int
    graphs: int
    kv_block: int
    block_size: int

    @classmethod
    def of(cls, info: ArtifactInfo, graphs: int) -> DraftMemory:
        """From the draft's artifact; graphs: bytes that its graphs share."""
        return cls(info.weight_bytes, graphs, info.kv_block_bytes, info.block_size)

    @property
    def fixed(self) -> int:
        return self.weights + self.graphs

    def kv(self, tokens: int) -> int:
        """Bytes of the draft's KV cache for that many tokens, plus one dummy block for padding."""
        return (-(-tokens // self.block_size) + 1) * self.kv_block


def kv_beside_draft(room: int, info: ArtifactInfo, draft: DraftMemory | None) -> int:
    """Bytes of `room` for the model's KV cache, leaving the rest to the draft's cache. 0 if one of them does not
    fit."""
    if draft is None:
        return room

    def fits(blocks: int) -> bool:
        return blocks * info.kv_block_bytes + draft.kv((blocks - 1) * info.block_size) <= room

    # The most that fit, of which one is the dummy block: the draft has no block for it.
    most = bisect_left(range(1, room // info.kv_block_bytes + 1), True, key=lambda blocks: not fits(blocks))
    return most * info.kv_block_bytes
