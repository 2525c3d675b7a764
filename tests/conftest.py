"""Shared fixtures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

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
