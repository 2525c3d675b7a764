"""The windows of layers, as config.json states them: a size, and in one of several ways which layers have it."""

from __future__ import annotations

from collections.abc import Callable

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.standard import layer_count

WINDOWED, FULL = "sliding_attention", "full_attention"


def stated_window(fields: Fields, usual: int = 0) -> int:
    """sliding_window; 0 for none, as null says too. usual: where the field is missing."""
    if fields.has("sliding_window"):
        return fields.integer("sliding_window")
    return 0 if fields.mentions("sliding_window") else usual


def used_window(fields: Fields, usual: int = 4096) -> int:
    """`stated_window` in a family with use_sliding_window, without which a size says nothing."""
    return stated_window(fields, usual) if fields.flag("use_sliding_window", False) else 0


def everywhere(fields: Fields, window: int) -> tuple[int, ...]:
    """`window` for each layer, whatever layer_types says."""
    return (window,) * layer_count(fields)


def by_layer(fields: Fields, window: int, usual: Callable[[int], bool]) -> tuple[int, ...]:
    """Window per layer, by layer_types; 0 for none. usual: whether a layer has a window, if there are no layer_types.

    Raises ModelError for an unknown type, and for a layer with a window of no size.
    """
    count = layer_count(fields)
    kinds = fields.texts("layer_types", count) if fields.has("layer_types") else ()
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise ModelError(f"{fields.origin}: layer type {brief(kind)} is not one of {FULL}, {WINDOWED}")
    windowed = [kind == WINDOWED for kind in kinds] or [usual(i) for i in range(count)]
    if True in windowed and not window:
        raise ModelError(
            f"{fields.origin}: layer {windowed.index(True)} has {WINDOWED}, but no window is given; correct "
            "sliding_window, use_sliding_window or layer_types"
        )
    return tuple(window if own else 0 for own in windowed)


def from_layer(fields: Fields, window: int, usual: int) -> tuple[int, ...]:
    """Window per layer, by layer_types or from layer max_window_layers on. usual: that, where the field is missing."""

    def has_window(layer: int) -> bool:
        return bool(window) and layer >= fields.integer("max_window_layers", usual, minimum=0)

    return by_layer(fields, window, has_window)


def all_but(fields: Fields, window: int, period: int) -> tuple[int, ...]:
    """Window per layer, by layer_types or for all but the last of each `period` layers."""
    return by_layer(fields, window, lambda layer: (layer + 1) % period != 0)


def kv_sources(fields: Fields, windows: tuple[int, ...], usual: int) -> tuple[int, ...]:
    """`ModelConfig.kv_layers`: the last num_kv_shared_layers layers read keys and values of the last layer before them
    with the same kind of window. usual: their number, where the field is missing."""
    first = len(windows) - fields.integer("num_kv_shared_layers", usual, minimum=0)
    if first == len(windows):
        return ()
    sources = {window: i for i, window in enumerate(windows[: max(0, first)])}
    if missing := set(windows[max(0, first) :]) - sources.keys():
        kind = WINDOWED if max(missing) else FULL
        raise ModelError(
            f"{fields.origin}: num_kv_shared_layers is {len(windows) - first}, but no layer of {kind} is before those; "
            "correct it"
        )
    return tuple(i if i < first else sources[window] for i, window in enumerate(windows))
