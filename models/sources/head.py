"""The directory of a head that guesses for a model, beside whose files it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmc.models.sources.base import ModelFiles, ModelSource
from llmc.models.sources.folder_checkpoint import weight_files


class HeadSource(ModelSource):
    """The head at `path`, which has the tokenizer of its model. model: the one that it guesses for."""

    def __init__(self, path: Path, model: ModelSource) -> None:
        super().__init__(path, allow_unknown_config=model.allow_unknown_config)
        self._model = model

    @property
    def is_quantized(self) -> bool:
        return False

    def model_files(self) -> ModelFiles:
        return self._model.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from weight_files(self.path)
        yield from self._model.weight_files()

    def all_files(self) -> Iterator[Path]:
        yield from (file for file in sorted(self.path.iterdir()) if file.is_file())
        yield from self._model.all_files()
