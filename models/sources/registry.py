"""The source of the model at a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.model_path import is_gguf
from llmc.models.errors import ModelError
from llmc.models.sources.base import ModelSource
from llmc.models.sources.folder import FolderSource
from llmc.models.sources.gguf.source import GgufSource
from llmc.models.sources.lora.source import MergedSource


def open_source(path: str | Path, adapters: Sequence[Path] = ()) -> ModelSource:
    """A .gguf file, or a directory in Hugging Face's format. Raises ModelError for a path that is neither.

    adapters: directories of LoRA adapters that are merged into the weights, in this order.
    """
    path = Path(path)
    return MergedSource(_open(path), adapters) if adapters else _open(path)


def _open(path: Path) -> ModelSource:
    if is_gguf(path):
        return GgufSource(path)
    if path.is_dir():
        return FolderSource(path)
    raise ModelError(
        f"{path} is not a directory and no .gguf file; pass the directory of a Hugging Face checkpoint, or a .gguf file"
    )
