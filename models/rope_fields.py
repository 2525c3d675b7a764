"""The rotary fields of config.json, current and older."""

from __future__ import annotations

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.rotary import Rope, RopeScaling

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope"}


def rope_table(fields: Fields) -> Fields:
    """`rope_parameters`, or the older `rope_scaling`; empty if there is neither."""
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
        if new != old:
            raise ModelError(
                f"{fields.origin}: rope_parameters is {brief(new)}, rope_scaling {brief(old)}; take out the wrong one"
            )
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    return fields.table(name) or Fields({}, fields.origin)


def _number(fields: Fields, table: Fields, name: str, default: float) -> float:
    """The value in the table, or the one beside it. Raises ModelError if they differ."""
    if table.has(name) and fields.has(name) and table.number(name) != fields.number(name):
        raise ModelError(
            f"{fields.origin}: {name} is {fields.number(name):g}, and {table.number(name):g} in {table.origin}; take "
            "out the wrong one"
        )
    return (table if table.has(name) else fields).number(name, default)


def read_rope(
    fields: Fields, max_positions: int, head_dim: int, *, theta: float = 10000.0, partial: float | None = None
) -> Rope:
    """Reads `rope_parameters`, or the older rope_theta and rope_scaling.

    theta, partial: the family's defaults. partial: None for a family that rotates whole heads and reads no
    partial_rotary_factor.
    """
    table = rope_table(fields)
    if nested := table.nested_names():
        raise ModelError(
            f"{table.origin} differs by layer type ({', '.join(map(brief, nested[:4]))}), which is not supported"
        )
    return rope_of(fields, table, max_positions, head_dim, theta=theta, partial=partial)


def rope_of(
    fields: Fields,
    table: Fields,
    max_positions: int,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
) -> Rope:
    """Reads `table`; values it lacks come from `fields` around it. partial: as of `read_rope`."""
    theta, proportional = _number(fields, table, "rope_theta", theta), _rope_type(table) == "proportional"
    # transformers reads the share of this rope type in every family.
    read = proportional or partial is not None
    partial = 1.0 if partial is None else partial
    if read:
        partial = _number(fields, table, "partial_rotary_factor", partial)
    if proportional:
        return _proportional(fields, table, theta, max_positions, head_dim, partial)
    dim = int(head_dim * partial)
    if partial > 1 or dim < 2 or dim % 2:
        raise ModelError(
            f"{fields.origin}: head_dim {head_dim} with partial_rotary_factor {partial} rotates {dim} elements, "
            f"which is not an even number from 2 to head_dim"
        )
    return Rope(theta, dim, _read_scaling(fields, table, max_positions, dim))


def _proportional(
    fields: Fields, table: Fields, theta: float, max_positions: int, head_dim: int, partial: float
) -> Rope:
    """The first frequencies of a whole head."""
    pairs = int(partial * head_dim // 2)
    if head_dim % 2 or not 1 <= pairs <= head_dim // 2:
        raise ModelError(
            f"{fields.origin}: head_dim {head_dim} with partial_rotary_factor {partial} rotates {pairs} pairs of "
            "elements, which is not from 1 to half of head_dim"
        )
    scaling = RopeScaling("proportional", table.number("factor", 1.0), max_positions, head_dim=head_dim)
    return Rope(theta, 2 * pairs, scaling)


def _rope_type(table: Fields) -> str:
    named = {table.text(name) for name in ("rope_type", "type") if table.has(name)} or {"default"}
    rope_type, *others = sorted({_OLD_NAMES.get(name, name) for name in named})
    if others:
        raise ModelError(
            f"{table.origin}: rope_type is {brief(table.raw('rope_type'))} and type "
            f"{brief(table.raw('type'))}; take out the wrong one"
        )
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"{table.origin}: rope type {brief(rope_type)} is not supported; one of {', '.join(ROPE_TYPES)}"
        )
    return rope_type


def _read_scaling(fields: Fields, table: Fields, max_positions: int, dim: int) -> RopeScaling | None:
    rope_type = _rope_type(table)
    if rope_type == "default":
        return None
    original = max_positions
    if rope_type in ("llama3", "yarn", "longrope"):
        # A value beside the table overrides one inside it, as in transformers.
        name = "original_max_position_embeddings"
        inside = table.integer(name, max_positions)
        original = fields.integer(name, inside)
    if rope_type in ("yarn", "longrope") and not table.has("factor"):
        factor = max_positions / original
    else:
        factor = table.number("factor")
    match rope_type:
        case "llama3":
            low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
            # Equal factors, as in Llama 4, leave no transition band.
            if low > high:
                raise ModelError(f"{table.origin}: low_freq_factor {low} must not be above high_freq_factor {high}")
            return RopeScaling("llama3", factor, original, low, high)
        case "longrope":
            return RopeScaling(
                "longrope",
                factor,
                original,
                attention_factor=table.optional_number("attention_factor"),
                frequency_factors=table.numbers("short_factor", dim // 2),
                long_factors=table.numbers("long_factor", dim // 2),
            )
        case "yarn":
            return RopeScaling(
                "yarn",
                factor,
                original,
                attention_factor=table.optional_number("attention_factor"),
                beta_fast=table.optional_number("beta_fast"),
                beta_slow=table.optional_number("beta_slow"),
                mscale=table.optional_number("mscale"),
                mscale_all_dim=table.optional_number("mscale_all_dim"),
                truncate=table.flag("truncate", True),
            )
    return RopeScaling(rope_type, factor, original)
