"""Sizes of Mamba-2 mixers in config.json."""

from __future__ import annotations

import math

from llmc.models.errors import ModelError
from llmc.models.families.delta_net import MOST_TAPS
from llmc.models.fields import Fields
from llmc.models.mamba import Mamba2
from llmc.models.standard import read_activation

_INFINITY = {"__float__": "Infinity"}
_LARGEST = 1e30  # a step beyond it is as good as unbounded

OF_MIXERS = frozenset({
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_floor", "time_step_limit", "time_step_max",
    "time_step_min",
})  # fmt: skip
"""Fields that `read_mixers` reads where a layer has a mixer, and those without effect."""


def checked(fields: Fields, net: Mamba2, groups: str, taps: str, activation: str) -> Mamba2:
    """The sizes, if they go together. groups, taps, activation: names of these fields. Raises ModelError."""
    if net.heads % net.groups:
        raise ModelError(f"{fields.origin}: {groups} {net.groups} does not divide the {net.heads} heads of mixers")
    if not 2 <= net.taps <= MOST_TAPS:
        raise ModelError(f"{fields.origin}: {taps} {net.taps} is not from 2 to {MOST_TAPS}")
    if (found := read_activation(fields, activation)) != "silu":
        raise ModelError(f"{fields.origin}: Mamba-2 mixers with the activation {found} are not supported")
    return net


def null_is_false(fields: Fields, name: str, default: bool) -> bool:
    """A flag whose default is not that of a null, as transformers reads some."""
    return fields.flag(name, default and not fields.mentions(name))


def read_mixers(fields: Fields, layers: tuple[int, ...], size_field: str | None = None) -> Mamba2:
    """Mixers of the given layers, by the field names of Bamba and its relatives.

    size_field: has the elements of a token's inputs, unless it is null; None for no such field.
    """
    heads = fields.integer("mamba_n_heads", 128)
    size, of = fields.integer("mamba_expand", 2) * fields.integer("hidden_size"), "mamba_expand times hidden_size"
    if size_field is not None and fields.has(size_field):
        size, of = fields.integer(size_field), size_field
    automatic = fields.raw("mamba_d_head", "auto") == "auto"
    head_dim = max(1, size // heads) if automatic else fields.integer("mamba_d_head")
    if heads * head_dim != size:
        raise ModelError(f"{fields.origin}: mamba_n_heads {heads} of {head_dim} elements are not the {size} of {of}")
    least, most = _step_limits(fields)
    net = Mamba2(
        layers,
        heads=heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        groups=fields.integer("mamba_n_groups", 1),
        taps=fields.integer("mamba_d_conv", 4),
        conv_bias=null_is_false(fields, "mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        least_step=least,
        most_step=most,
    )
    return checked(fields, net, "mamba_n_groups", "mamba_d_conv", "hidden_act")


def _step_limits(fields: Fields) -> tuple[float, float | None]:
    """Bounds of steps; transformers writes infinity as an object."""
    limits = fields.raw("time_step_limit", [0.0, math.inf])
    if isinstance(limits, list):
        limits = [math.inf if limit == _INFINITY else limit for limit in limits]
    if not isinstance(limits, list) or len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits):
        raise ModelError(f"{fields.origin}: time_step_limit is not a list of two numbers")
    least, most = limits
    if not 0 <= least < most or least > _LARGEST:
        raise ModelError(f"{fields.origin}: time_step_limit {least}, {most} is not a range of positive steps")
    return float(least), None if most > _LARGEST else float(most)
