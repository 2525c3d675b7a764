"""Packed weights are reused only while everything that made them is unchanged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.compiler import pipeline


def test_weights_key_follows_the_checkpoint_and_the_weight_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    resolved = SimpleNamespace(model=SimpleNamespace(rope_theta=1e4, rope_scaling=None))

    def components() -> dict[str, str]:
        checkpoint, layout = SimpleNamespace(path=tmp_path), SimpleNamespace(header=b"header")
        return pipeline.weights_components(checkpoint, resolved, layout)  # type: ignore[arg-type]

    first = components()
    assert components() == first
    monkeypatch.setattr(pipeline, "sources_digest", lambda: "an edited weight map")
    assert {k for k in first if components()[k] != first[k]} == {"models"}
    file.write_bytes(b"other")
    assert {k for k in first if components()[k] != first[k]} == {"models", "files"}
