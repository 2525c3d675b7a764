"""Loads the configuration of a model, as its family reads it."""

from __future__ import annotations

from pathlib import Path

from llmc.models.config import ModelConfig
from llmc.models.sources.registry import open_source


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of the model at `path`. Raises ModelError; see `ModelSource.config`."""
    return open_source(path).config()
