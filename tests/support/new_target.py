"""Judges a target that is new to llmc: its models against transformers, the reference target and its own bits, and the
device conformance suite on the device that runs its code."""

from __future__ import annotations

from pathlib import Path

from llmc.compiler.targets.registry import resolve_target
from llmc.runtime.debug.diff import diff_artifacts

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.conformance import check_conformance, conformance_artifact
from support.native_build import native_program
from support.parity import LADDER, check_bits, reference_logits
from support.tiny_models import make_tiny_model

_MODELS = ("f32", "bf16, norms of q and k", "w8a8")
"""Of the suite's models: all dtypes of activations and weights."""


def check_target(name: str, folder: Path, bound: float = 1e-4) -> None:
    """bound: of the relative error of logits in float32."""
    assert resolve_target(name).runs_here()
    cache = folder / "cache"
    model = make_tiny_model(folder / "model", "llama", num_attention_heads=6, num_key_value_heads=2)
    compile_tiny(model, folder / "reference", cache, buckets=LADDER, dtype="f32", target="reference").close()
    with compile_tiny(model, folder / name, cache, buckets=LADDER, dtype="f32", target=name) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens), bound)
        check_bits(artifact)
    found = diff_artifacts(folder / "reference", folder / name, tokens[:20])
    assert found.tensors
    assert found.first(bound) is None
    suite = native_program("device_conformance")
    for number, one in enumerate(_MODELS):
        check_conformance(suite, conformance_artifact(one, name, folder / str(number), cache))
