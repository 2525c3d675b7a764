"""Judges a family of models that is new to llmc: compiled for every target here, against the same module in torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from llmc.compiler.ops.eager import define_ops
from llmc.compiler.targets.registry import native_target, resolve_target
from llmc.models.families.family import Family
from llmc.models.read_config import load_config
from llmc.models.registry import FAMILIES

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.parity import LADDER, check_bits
from support.quirky_model import eager_logits
from support.tiny_models import make_tiny_model


def targets_here() -> list[str]:
    """This machine's target, and the reference target where it is for this architecture."""
    return [native_target().name, *(["reference"] if resolve_target("reference").runs_here() else [])]


@contextmanager
def registered(family: Family) -> Iterator[None]:
    """While it lasts llmc has the family; one that it has already stays."""
    had = family.model_type in FAMILIES
    FAMILIES.setdefault(family.model_type, family)
    try:
        yield
    finally:
        if not had:
            del FAMILIES[family.model_type]


def checkpoint_of(family: Family, path: Path, **fields: object) -> Path:
    """A tiny checkpoint of the family, which llmc must have: a Llama's config with `fields`, and the tensors that the
    weight map asks for, where a Llama has them its own."""
    model = make_tiny_model(path, "llama", num_hidden_layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields, "model_type": family.model_type}))
    sources = [s for target in family.weight_map(load_config(model)).targets for s in target.sources]
    tensors, rng = load_file(model / "model.safetensors"), np.random.default_rng(2)
    made = {
        source.name: tensors[source.name]
        if source.name in tensors
        else rng.normal(scale=0.1, size=source.shape).astype(np.float32)
        for source in sources
    }
    save_file(made, model / "model.safetensors")
    return model


def check_family(family: Family, folder: Path, **fields: object) -> None:
    """Every bucket of every target has the logits of the eager module, and a request its bits in any company."""
    define_ops()
    with registered(family):
        model = checkpoint_of(family, folder / "model", **fields)
        for target in targets_here():
            with compile_tiny(
                model, folder / target, folder / "cache", buckets=LADDER, dtype="f32", target=target
            ) as artifact:
                assert len(artifact.graphs()) == 14
                tokens = random_tokens(artifact.info.vocab_size, 48)
                check_every_bucket(artifact, tokens, eager_logits(model, tokens, "f32"))
                check_bits(artifact)
