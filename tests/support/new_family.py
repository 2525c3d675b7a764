"""Judges a family of models that is new to llmc: against transformers, eagerly and compiled for every target here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.targets.registry import native_target, resolve_target
from llmc.models.families.family import Family
from llmc.models.registry import FAMILIES

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.paged_reference import check_equals_transformers
from support.parity import LADDER, check_bits, reference_logits
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


def check_compiled(model: Path, folder: Path, logits: Callable[[list[int]], np.ndarray]) -> None:
    """Compiled for every target here, the model has these logits in every bucket. A request has its bits in any
    company. logits: of a text, float32 [T, V]."""
    for target in targets_here():
        with compile_tiny(
            model, folder / target, folder / "cache", buckets=LADDER, dtype="f32", target=target
        ) as artifact:
            assert len(artifact.graphs()) == 14
            tokens = random_tokens(artifact.info.vocab_size, 48)
            check_every_bucket(artifact, tokens, logits(tokens))
            check_bits(artifact)


def check_family(model_type: str, folder: Path, **fields: Any) -> None:
    """A tiny model of a family that transformers has equals that of transformers, eagerly and compiled. fields: of its
    config."""
    model = make_tiny_model(folder / "model", model_type, **{"num_hidden_layers": 2, **fields})
    check_equals_transformers(model)
    check_compiled(model, folder, lambda tokens: reference_logits(model, tokens))
