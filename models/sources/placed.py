"""A checkpoint with the places of a head's tokens, which the files state in another form, or not at all."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.models.convert import Array
from llmc.models.draft_vocab import PLACES
from llmc.models.sources.base import ArrayTensor, Checkpoint, Tensor
from llmc.models.sources.joined import JoinedCheckpoint


class PlacedCheckpoint(JoinedCheckpoint):
    """places: float32 [vocab_size], see `PLACES`; None for a head that may guess all tokens."""

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Checkpoint], places: Array | None) -> None:
        super().__init__(whole, parts)
        self._places = places

    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*super().names(), *(() if self._places is None else (PLACES,)))))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places.shape if name == PLACES and self._places is not None else super().shape(name)

    def dtype(self, name: str) -> str:
        return "f32" if name == PLACES else super().dtype(name)

    def check_dtype(self, name: str) -> None:
        if name != PLACES:
            super().check_dtype(name)

    def tensor(self, name: str) -> Tensor:
        return ArrayTensor(self._places) if name == PLACES and self._places is not None else super().tensor(name)
