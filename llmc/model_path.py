"""What is taken for a model: a directory in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether something that is no directory is called as a GGUF file is; a pipe is refused when it is opened."""
    return path.suffix == GGUF_SUFFIX and path.exists() and not path.is_dir()


def is_model(path: Path) -> bool:
    """Whether there is a model to compile; nothing in it is read."""
    return is_gguf(path) or (path / "config.json").is_file()
