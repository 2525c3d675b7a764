"""The source of the model at a path."""

from __future__ import annotations

from pathlib import Path

from llmc.models.errors import ModelError
from llmc.models.sources.base import ModelSource
from llmc.models.sources.safetensors import SafetensorsSource


def open_source(path: str | Path) -> ModelSource:
    """A directory is one in Hugging Face's format. Raises ModelError for a path that is nothing of the kind."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsSource(path)
    raise ModelError(f"{path} is not a directory; pass the directory of a Hugging Face checkpoint")
