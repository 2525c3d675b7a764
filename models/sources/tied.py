"""Whether a checkpoint ties what its config.json ties: the embedding and the output projection."""

from __future__ import annotations

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, Tensor

_CHUNK_BYTES = 4 << 20


def head_of_its_own(config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, str] | None:
    """(output projection, embedding), by their names in a checkpoint that has both, of one shape, and not as one
    matrix; None otherwise. Raises ModelError.

    config: ties the two. transformers then takes each as it is. Reads both where both are there, up to the first
    difference.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    weights = get_family(config.model_type).weight_map_of(config, shapes)
    head = f"{weights.head}.weight"
    embedding = next((target.sources[0].name for target in weights.targets if target.name == "embed.weight"), "")
    if head not in shapes or shapes[head] != shapes.get(embedding):
        return None
    for name in (head, embedding):
        checkpoint.check_dtype(name)
    same = _same(checkpoint.tensor(head), checkpoint.tensor(embedding))
    checkpoint.release()
    return None if same else (head, embedding)


def _same(one: Tensor, other: Tensor) -> bool:
    rows, columns = one.shape
    count = max(1, _CHUNK_BYTES // (4 * columns))
    parts = [np.empty((min(count, rows), columns), np.float32) for _ in range(2)]
    for first in range(0, rows, count):
        of_one, of_other = (part[: rows - first] for part in parts)
        one.read(first, of_one)
        other.read(first, of_other)
        if not np.array_equal(of_one, of_other, equal_nan=True):
            return False
    return True
