"""A config.json alone, which describes a model but not its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.sources.base import Checkpoint
from llmc.models.sources.folder import FolderSource
from llmc.quantize.checkpoints import quantization_method
from llmc.quantize.formats.base import QuantizeError

_NAME = "config.json"


class ConfigFileSource(FolderSource):
    """The file may have any name; neighbouring files are read only if it is called config.json."""

    def __init__(self, file: Path, **asked: Any) -> None:
        super().__init__(file.parent, **asked)
        self._file = file

    @property
    def config_file(self) -> Path:
        return self._file

    def _optional(self, name: str) -> Fields | None:
        return super()._optional(name) if self._file.name == _NAME else None

    @property
    def is_quantized(self) -> bool:
        """False: there are no tensors."""
        return False

    def _head_of_its_own(self, config: ModelConfig) -> None:
        return None

    def quantized_by(self) -> str | None:
        """The quantization method of the weights; None if they are not quantized. Raises ModelError for an unsupported
        one."""
        settings = self.quantization
        try:
            return None if settings is None else quantization_method(settings)
        except QuantizeError as error:
            raise ModelError(f"{self._file}: {error}") from None

    def checkpoint(self) -> Checkpoint:
        raise ModelError(f"{self._file} is a configuration without weights; pass the directory of a checkpoint")
