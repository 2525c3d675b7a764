"""Sentences on the conversion of a checkpoint's numbers: which are kept, which are converted, and the error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.compiler.partition import HEAD
from llmc.compiler.resolved import Resolved
from llmc.compiler.store.conversions import types_of
from llmc.models.convert import DTYPES
from llmc.models.loader import Parameter, check_checkpoint, load_parameters
from llmc.models.rank_prompts import prompt_name
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint
from llmc.quantize import layer_kind
from llmc.quantize.conversion import Conversion, conversion_of, error_of, error_text


def notes(resolved: Resolved, checkpoint: Checkpoint, conversions: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """One sentence per group of layer kinds kept alike, and one per converted kind.

    Unquantized numbers are mentioned only if precision is lost. conversions: as in the manifest; None if nothing was
    measured.
    """
    lost = {name: conversion_of(record) for name, record in (conversions or {}).items()}
    types = types_of(check_checkpoint(resolved.model, checkpoint), checkpoint)
    kept: dict[tuple[str, str], set[str]] = defaultdict(set)
    changed: dict[tuple[str, str, str], list[Conversion]] = defaultdict(list)
    for parameter in load_parameters(resolved.model, checkpoint, resolved.act_dtype):
        name = parameter.name
        quantized = any(one not in DTYPES for one in types[name].split(", "))
        if not quantized and name not in lost:
            continue
        what = f"{layer_kind(name)} ({types[name].upper()})"
        becomes, advice = _becomes(resolved, parameter) if quantized else (_rounded(resolved, name), "")
        if name in lost:
            changed[what, becomes, advice].append(lost[name])
        else:
            kept[becomes, advice].add(what)
    exact = "" if conversions is None else ", exact"
    found = [f"{', '.join(sorted(what))}: {how}{exact}{advice}" for (how, advice), what in sorted(kept.items())]
    for (one, how, advice), matrices in sorted(changed.items()):
        found.append(f"{one}: {how}, relative error {error_text(error_of(matrices))}{advice}{_infinite(matrices)}")
    if resolved.kv_scales:
        found.append(f"the KV cache has the scales that the {resolved.kv_scales} states for {resolved.kv_dtype}")
    return (*found, *_left_head(resolved, checkpoint), *checkpoint.notes(), *_of_pairs(resolved))


def _infinite(matrices: Sequence[Conversion]) -> str:
    """What has become of numbers that are too large for the new type."""
    count = sum(one.overflows for one in matrices)
    return f"; too large for it, and infinite now: {count:,}; a wider --dtype holds them" if count else ""


def _of_pairs(resolved: Resolved) -> tuple[str, ...]:
    """A note on the prompt of pairs, for a family whose rankers may have one."""
    task, vectors = resolved.model.task, get_family(resolved.model.model_type).vectors
    if task is None or task.name != "rank" or vectors is None or not vectors.rank_prompt:
        return ()
    name = prompt_name(task)
    if name == "none":
        return (
            f"a query and a document are the tokenizer's own pair; --rank-prompt {vectors.rank_prompt} puts them into "
            "that prompt",
        )
    return (f"a query and a document stand in the prompt of {name}; --rank-prompt none leaves it out",)


def _rounded(resolved: Resolved, name: str) -> str:
    """The conversion of an unquantized weight, in words."""
    scheme = resolved.recipe.schemes.get(name)
    return f"rounded to {resolved.act_dtype if scheme is None else scheme.describe()}"


def _becomes(resolved: Resolved, parameter: Parameter) -> tuple[str, str]:
    """The conversion of an already quantized weight, in words, and the alternatives."""
    recipe, stored = resolved.recipe, parameter.stored
    scheme, ordered = recipe.schemes.get(parameter.name), parameter.name in recipe.act_order
    if scheme is None:
        why = ", for the columns of its parts lie in different orders" if parameter.has_other_orders else ""
        return f"dequantized to {resolved.act_dtype}{why}", "; --quant SCHEME rounds them anew"
    if stored is not None and stored.format == scheme.weight and (ordered or stored.columns is None):
        return f"kept as stored, {scheme.describe()}{', act-order' if ordered else ''}", ""
    return f"dequantized and rounded anew to {scheme.describe()}", ""


def _left_head(resolved: Resolved, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note on an output projection that is stored quantized but not read."""
    if not resolved.model.tie_word_embeddings or HEAD not in checkpoint.names():
        return ()
    kind = checkpoint.dtype(HEAD)
    if kind in DTYPES:
        return ()
    return (
        f"{layer_kind(HEAD)} ({kind.upper()}): not read, for {checkpoint.config_name} ties it to the embedding; set "
        "tie_word_embeddings to false there to have it",
    )
