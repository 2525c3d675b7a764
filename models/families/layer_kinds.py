"""Kinds of attention by layer. Where a family's linear attention is not supported, the first such layer is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.standard import layer_count

FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
"""Of models with state space layers."""


def read_layer_types(
    fields: Fields, usual: Sequence[str], other: str = LINEAR, old_names: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """FULL or the other kind by layer. usual: the layers of a config without layer_types. old_names: of both kinds."""
    stated = fields.texts("layer_types", layer_count(fields)) if fields.has("layer_types") else tuple(usual)
    kinds = tuple(old_names.get(kind, kind) for kind in stated)
    for kind in kinds:
        if kind not in (FULL, other):
            raise ModelError(f"{fields.origin}: layer type {brief(kind)} is not one of {FULL}, {other}")
    return kinds


def check_layer_types(fields: Fields, usual: Sequence[str], what: str) -> None:
    """Raises ModelError unless every layer has full attention. what: the family's linear attention."""
    check_layers(fields, [kind == LINEAR for kind in read_layer_types(fields, usual)], what)


def check_layers(fields: Fields, linear: Sequence[bool], what: str) -> None:
    """Raises ModelError if a layer has linear attention. linear: by layer."""
    if any(linear):
        model = fields.text("model_type")
        raise ModelError(
            f"{fields.origin}: layer {linear.index(True)} has linear attention ({what}), as have {sum(linear)} of "
            f"{len(linear)} layers, which is not supported; a {model} model of softmax attention alone is"
        )
