"""A model whose tokens are bytes, and one with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from support.artifacts import TINY_LADDER, TinyArtifact, made_once
from support.paths import ROOT

TEXT = "It was a truth which nobody at Longbourn cared to deny, that a walk before dinner does no harm. "


@pytest.fixture(scope="session")
def changed_artifact(
    tiny_artifact: TinyArtifact, chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model of `chat_artifact` with other weights, near its own; all graphs come from the cache."""
    from safetensors.torch import load_file, save_file

    from support.compiled import compile_tiny

    def make(root: Path) -> None:
        shutil.copytree(tiny_artifact.model, root / "model")
        weights = load_file(root / "model" / "model.safetensors")
        draw = torch.Generator().manual_seed(1)
        noisy = {
            name: one + 0.1 * one.float().std().nan_to_num() * torch.randn(one.shape, generator=draw)
            for name, one in weights.items()
        }
        save_file(noisy, root / "model" / "model.safetensors", {"format": "pt"})
        ladder, cache = TINY_LADDER, tiny_artifact.cache
        compile_tiny(root / "model", root / "artifact", cache, buckets=ladder, dtype="f32", tokenizer="none").close()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(chat_artifact / name, root / "artifact" / name)

    return made_once(tmp_path_factory, "changed", make) / "artifact"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A text of 96 tokens, in windows of 40 one of 16 at the end."""
    file = tmp_path / "sample.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def english_tokenizer(chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`chat_artifact` with another model's tokenizer."""
    path = tmp_path_factory.mktemp("other-tokens") / "artifact"
    shutil.copytree(chat_artifact, path)
    shutil.copy(ROOT / "examples" / "tiny-english" / "tokenizer.json", path / "tokenizer.json")
    return path
