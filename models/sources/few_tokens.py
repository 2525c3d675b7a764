"""A head that shares its model's output projection, but may guess some of the tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.draft_vocab import places_of, with_few_tokens
from llmc.models.loader import check_checkpoint
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource
from llmc.models.sources.placed import PlacedCheckpoint
from llmc.models.weight_map import Rows, WeightMap


class FewTokensSource(ModelSource):
    """head: the one with all tokens. tokens: those that it may guess, ascending."""

    def __init__(self, head: ModelSource, tokens: tuple[int, ...]) -> None:
        super().__init__(head.path, allow_unknown_config=head.allow_unknown_config)
        self._head, self._tokens = head, np.array(tokens, np.int32)

    def config(self) -> ModelConfig:
        count = len(self._tokens)
        return replace(self._head.config(), draft_vocab_size=count, tie_word_embeddings=False)

    def ignored_config(self) -> tuple[str, ...]:
        return self._head.ignored_config()

    @property
    def is_quantized(self) -> bool:
        return self._head.is_quantized

    def checkpoint(self) -> Checkpoint:
        return _FewTokensCheckpoint(self._head, self._tokens)

    def model_files(self) -> ModelFiles:
        return self._head.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from self._head.weight_files()

    def all_files(self) -> Iterator[Path]:
        yield from self._head.all_files()


class _FewTokensCheckpoint(PlacedCheckpoint):
    def __init__(self, head: ModelSource, tokens: Rows) -> None:
        whole, config = head.checkpoint(), head.config()
        super().__init__(whole, {}, places_of(tokens, config.vocab_size))
        self._map = with_few_tokens(check_checkpoint(config, whole), tokens)

    def weight_map(self, config: ModelConfig) -> WeightMap:
        return self._map
