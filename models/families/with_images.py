"""Shared by families that read images and text: llmc has the text decoder, whose config is in a nested table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmc.graphs_format import ROPE_AXES
from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.known_keys import HARMLESS, NEUTRAL, nested
from llmc.models.layout import Layout, behind, without

_TEXT = "text_config"
_TIED = "tie_word_embeddings"
_OF_THE_WHOLE = ("eos_token_id", "bos_token_id")
_ROPES = ("rope_parameters", "rope_scaling")
_SHARES = ("mrope_section", "mrope_interleaved")
_OF_THREE, _PLAIN = "mrope", "default"
OF_IMAGES = frozenset({
    "vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id", "eoi_token_id",
    "image_token_id", "mm_tokens_per_image", "video_token_id", "vision_token_id", "vision_start_token_id",
    "vision_end_token_id",
})  # fmt: skip
"""Harmless keys: positions of images in text, and the vision encoder."""


def text_fields(fields: Fields, defaults: Mapping[str, Any] | None = None, table: str = _TEXT) -> Fields:
    """The decoder's fields in config.json. defaults: values omitted when usual. The outer table decides first whether
    the embedding is tied, and where a text ends, as in transformers."""
    text = fields.table(table)
    if text is None:
        raise ModelError(f"{fields.origin} lacks the field {table!r}")
    dtype = fields.raw("dtype", fields.raw("torch_dtype", "float32"))
    found = {name: fields.raw(name) for name in _OF_THE_WHOLE if fields.has(name)}
    if not text.has("dtype") and not text.has("torch_dtype"):
        found["dtype"] = dtype
    outer = {name: found[name] for name in _OF_THE_WHOLE if name in found}
    found = {**(defaults or {}), **found}
    found = {name: value for name, value in found.items() if not text.has(name)} | outer
    if text.has(_TIED) or fields.has(_TIED):
        found[_TIED] = fields.raw(_TIED, text.raw(_TIED, False))
    return text.with_values(**found)


def with_one_position(fields: Fields) -> Fields:
    """The same for a text, whose tokens have one position in time, height and width. Then it does not count how these
    share the elements of a head: positions of images (mrope) are rotated as those of every decoder."""
    tables = {name: fields.raw(name) for name in _ROPES if isinstance(fields.raw(name, None), dict)}
    plain = {
        name: {key: _PLAIN if value == _OF_THREE else value for key, value in table.items() if key not in _SHARES}
        for name, table in tables.items()
    }
    return fields.with_values(**plain)


def on_axes(config: ModelConfig, fields: Fields, sections: Sequence[int], *, by_turns: bool = False) -> ModelConfig:
    """A text model whose positions have axes, since rows of images are in its texts. Others as of `_axes_of`."""
    axes = _axes_of(fields, config.rope.dim // 2, sections, by_turns=by_turns)
    return replace(config, rope=replace(config.rope, axes=axes))


def _axes_of(fields: Fields, frequencies: int, sections: Sequence[int], *, by_turns: bool = False) -> str:
    """The axis of each rotary frequency, as `Rope.axes` has it. fields: the decoder's. sections, by_turns: of files
    that do not say how many frequencies follow time, height and width, and whether these take turns.

    Raises ModelError.
    """
    table: Mapping[str, Any] = next((t for name in _ROPES if isinstance(t := fields.raw(name, None), dict)), {})
    found, turns = table.get(_SHARES[0], list(sections)), table.get(_SHARES[1], by_turns)
    fits = (
        isinstance(found, list) and len(found) == ROPE_AXES and all(type(n) is int and 0 <= n < 1 << 16 for n in found)
    )
    if not fits or not isinstance(turns, bool):
        raise ModelError(
            f"{fields.origin}: {_SHARES[0]} {brief(found)} is not {ROPE_AXES} whole numbers, or {_SHARES[1]} "
            f"{brief(turns)} is not true or false; download it again"
        )
    axes = "".join(str(axis) * count for axis, count in enumerate(found))
    if len(axes) != frequencies:
        raise ModelError(
            f"{fields.origin}: {_SHARES[0]} {brief(found)} shares {len(axes)} frequencies, but a head has "
            f"{frequencies}; download it again"
        )
    if not turns:
        return axes
    taken = ["0"] * len(axes)
    for axis in range(1, ROPE_AXES):
        for place in range(axis, ROPE_AXES * found[axis], ROPE_AXES):
            if place < len(taken):
                taken[place] = str(axis)
    return "".join(taken)


def within(layout: Layout, *others: str, name: str = "language_model") -> Layout:
    """As newer versions of transformers call the parts of such a model. others: its modules that llmc does not use.
    name: of the decoder. Modules beside the decoder, such as Qwen's multi-token prediction, stay where they are."""
    found = behind(without(layout, "model."), f"model.{name}.")
    beside = (module for module in layout.other_modules if not module.startswith("model."))
    modules = (*found.other_modules, *beside, *(f"model.{name}" for name in others))
    return replace(found, head=layout.head, other_modules=modules)


def harmless_with_images(names: frozenset[str], table: str = _TEXT) -> frozenset[str]:
    """names: harmless keys of the decoder's table."""
    return OF_IMAGES | nested(table, HARMLESS | names)


def neutral_with_images(values: Mapping[str, Any], table: str = _TEXT) -> dict[str, Any]:
    """values: neutral keys and values of the decoder's table."""
    return {f"{table}.{name}": value for name, value in {**NEUTRAL, **values}.items()}
