"""Shared fixtures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llmc.runtime.binding import Artifact

TINY_LADDER = "prefill=[1,2]x[16,32],decode=[1,2]x[64]"


@dataclass(frozen=True)
class TinyArtifact:
    """A compiled tiny model, the checkpoint it came from and the cache that has its kernels. Copy before changing."""

    model: Path
    artifact: Path
    cache: Path


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> TinyArtifact:
    # Imported here: most tests need neither torch nor the compiler.
    from compiled import compile_tiny
    from tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(root / "model", "llama", num_hidden_layers=2)
    compile_tiny(model, root / "artifact", root / "cache", buckets=TINY_LADDER, dtype="f32").close()
    return TinyArtifact(model, root / "artifact", root / "cache")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for the engine's models: most of their kernels are the same."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Path, Artifact]:
    """A model with blocks of 16 tokens and several graphs of each phase."""
    from compiled import compile_tiny
    from engine_driver import MIXED_LADDER
    from tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("llama")
    model = make_tiny_model(root / "model", "llama")
    return model, compile_tiny(model, root / "artifact", kernel_cache, buckets=MIXED_LADDER, dtype="f32", block_size=16)
