"""Families that are also written as GGUF files, by model_type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """architecture: its name, as in `ARCHITECTURES`. windows: reading it, the same sliding window on every layer comes
    back."""

    architecture: str
    windows: bool = False


WRITTEN: Mapping[str, Written] = {
    "llama": Written("llama"),
    # llama.cpp's llama includes Mistral's models.
    "mistral": Written("llama", windows=True),
    "qwen2": Written("qwen2"),
    "qwen3": Written("qwen3"),
}
