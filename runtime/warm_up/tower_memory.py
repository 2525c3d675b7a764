"""Memory that a tower, which turns images into rows, takes from its model's budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.runtime.binding import Artifact, ArtifactInfo, GraphInfo
from llmc.runtime.warm_up.budget import graph_set_bytes


def tower_memory(images: Path | None) -> int:
    """Bytes that the tower of this artifact takes; 0 without one. Raises the binding's errors."""
    if images is None:
        return 0
    with Artifact(images) as artifact:
        return tower_bytes(artifact.info, artifact.graphs())


def tower_bytes(info: ArtifactInfo, graphs: Sequence[GraphInfo]) -> int:
    """Weights, what its graphs share, patches and rows of an image, and keys and values of the largest one, with a
    dummy block."""
    longest = max((graph.max_tokens for graph in graphs), default=0)
    blocks = -(-longest // info.block_size) + 1
    shared = graph_set_bytes(graphs, info.vector_width, states_width=info.states_width)
    return info.weight_bytes + shared + blocks * info.kv_block_bytes
