"""A checkpoint whose last layers are in other checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.models.convert import Array
from llmc.models.sources.base import Checkpoint, Tensor


class JoinedCheckpoint(Checkpoint):
    """The tensors of `whole`, and those of each of `parts` with the part's name and a dot in front."""

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Checkpoint]) -> None:
        self.path, self.config_name = whole.path, whole.config_name
        self._whole, self._parts = whole, parts

    def _at(self, name: str) -> tuple[Checkpoint, str]:
        """(checkpoint that has the tensor, its name there)."""
        part, _, own = name.partition(".")
        return (self._parts[part], own) if part in self._parts else (self._whole, name)

    def names(self) -> tuple[str, ...]:
        of_parts = (f"{part}.{name}" for part, checkpoint in self._parts.items() for name in checkpoint.names())
        return tuple(sorted((*self._whole.names(), *of_parts)))

    def shape(self, name: str) -> tuple[int, ...]:
        checkpoint, own = self._at(name)
        return checkpoint.shape(own)

    def dtype(self, name: str) -> str:
        checkpoint, own = self._at(name)
        return checkpoint.dtype(own)

    def check_dtype(self, name: str) -> None:
        checkpoint, own = self._at(name)
        checkpoint.check_dtype(own)

    def tensor(self, name: str) -> Tensor:
        checkpoint, own = self._at(name)
        return checkpoint.tensor(own)

    def release(self) -> None:
        for checkpoint in (self._whole, *self._parts.values()):
            checkpoint.release()

    def adapted(self) -> frozenset[str]:
        return self._whole.adapted()

    def kv_scales(self, kv_dtype: str, kv_heads: Mapping[int, int]) -> list[Array] | None:
        return self._whole.kv_scales(kv_dtype, kv_heads)

    def called(self, name: str) -> str:
        checkpoint, _ = self._at(name)
        return self._whole.called(name) if checkpoint is self._whole else name

    def notes(self) -> tuple[str, ...]:
        return self._whole.notes()
