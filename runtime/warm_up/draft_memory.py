"""What a draft takes of the memory of its model: weights, what its graphs share, and a KV cache beside the model's."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.runtime.binding import ArtifactInfo


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes. weights, graphs: whatever is served; kv_block: of a KV block of block_size tokens."""

    weights: int
    graphs: int
    kv_block: int
    block_size: int

    @classmethod
    def of(cls, info: ArtifactInfo, graphs: int) -> DraftMemory:
        """Of the draft's artifact, whose graphs share so many bytes."""
        return cls(info.weight_bytes, graphs, info.kv_block_bytes, info.block_size)

    @property
    def fixed(self) -> int:
        return self.weights + self.graphs

    def kv(self, tokens: int) -> int:
        """The KV cache beside a model's of so many tokens; one block more is the dummy block of padding."""
        return (-(-tokens // self.block_size) + 1) * self.kv_block


def kv_beside_draft(room: int, info: ArtifactInfo, draft: DraftMemory | None) -> int:
    """Of `room` bytes those for the model's KV cache, so that the draft's cache has the rest; 0 where neither fits."""
    if draft is None:
        return room
    each = info.kv_block_bytes + -(-draft.kv_block * info.block_size // draft.block_size)
    return max(0, (room - 2 * draft.kv_block) // each) * info.kv_block_bytes
