"""A compiled tiny model of which some layers have a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.artifacts import made_once
from support.compiled import compile_tiny
from support.tiny_models import make_tiny_model


def state_artifact(factory: pytest.TempPathFactory, cache: Path) -> Path:
    """For 3 sequences of 64 tokens, in blocks of 16. Without a tokenizer. Copy before changing."""

    def make(folder: Path) -> None:
        model = make_tiny_model(folder / "model", "lfm2", layer_types=["conv", "full_attention", "conv"])
        ladder = "prefill=[2]x[32],decode=[3]x[64]"
        options: dict[str, Any] = {"buckets": ladder, "target": "reference", "block_size": 16}
        compile_tiny(model, folder / "out", cache, tokenizer="none", **options).close()

    return made_once(factory, "state-artifact", make) / "out"
