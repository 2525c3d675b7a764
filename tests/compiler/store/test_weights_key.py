"""Packed weights are reused only while everything that made them is unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.store import keys
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.registry import resolve_target
from llmc.models import load_config

from support.tiny_models import make_tiny_model


def test_weights_key_follows_the_checkpoint_and_the_weight_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    config, file = load_config(model), model / "model.safetensors"

    cpu, reference = resolve_target("x86-64-v3"), resolve_target("reference")

    def components(max_model_len: int = 64, target: Target = cpu, header: bytes = b"header") -> dict[str, str]:
        return keys.weights_components([file], config, max_model_len, target, header)

    def changed(**given: object) -> set[str]:
        found = components(**given)  # type: ignore[arg-type]
        return {name for name in first if found[name] != first[name]}

    first = components()
    assert changed() == set()
    assert changed(max_model_len=65) == {"tables"}
    assert changed(header=b"another layout") == {"layout"}
    assert changed(target=reference) == {"sources"}
    monkeypatch.setattr(keys, "sources_digest", lambda *names: f"an edited weight map beside {names}")
    assert changed() == {"sources"}
    file.write_bytes(file.read_bytes() + b" ")
    assert changed() == {"sources", "files"}
