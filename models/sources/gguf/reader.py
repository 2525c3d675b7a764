"""Reads an architecture's metadata by short names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmc.models.errors import ModelError
from llmc.models.sources.gguf.architecture import Architecture
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.part_names import layers_with

Shapes = Mapping[str, tuple[int, ...]]
_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "layernorm_epsilon")


class Reader:
    """Metadata of an architecture by their short names."""

    def __init__(self, metadata: Metadata, architecture: Architecture, shapes: Shapes) -> None:
        self.metadata, self.architecture, self.shapes = metadata, architecture, shapes

    def key(self, name: str) -> str:
        return f"{self.architecture.name}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(self.key(name), default)

    def cap(self, name: str) -> float | None:
        """A bound; None if there is none."""
        return self.number(name, 0.0) or None

    def window(self) -> int:
        """The window in tokens; 0 for none."""
        return self.metadata.integer(self.key("attention.sliding_window"), 0, minimum=0)

    def flag(self, name: str, default: bool) -> bool:
        return self.metadata.flag(self.key(name), default)

    def has(self, part: str) -> bool:
        """Whether the first layer has such a tensor."""
        return f"blk.0.{part}" in self.shapes

    def rows(self, part: str) -> int:
        """Rows of that matrix in the first layer that has it; 0 if none has."""
        layers = layers_with(part, iter(self.shapes))
        return self.shapes[f"blk.{layers[0]}.{part}"][-2] if layers else 0

    def eps(self) -> dict[str, Any]:
        """The epsilon of norms, under all families' names."""
        kinds = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
        found = [self.number(kind) for kind in kinds if self.metadata.has(self.key(kind))]
        return dict.fromkeys(_EPS_NAMES, found[0] if found else self.number(kinds[0]))

    def layers(self) -> int:
        """Number of layers; those after the last do multi-token prediction."""
        count = self.integer("block_count")
        return count - self.metadata.integer(self.key("nextn_predict_layers"), 0, minimum=0, maximum=count - 1)

    def of_layers(self, name: str) -> list[int]:
        """Of each layer, 0 or a number that all others share: an array, or one number for all."""
        key, every = self.key(name), self.integer("block_count")
        array = self.metadata.array(key) if self.metadata.is_array(key) else None
        found = [self.metadata.integer(key, minimum=0)] * every if array is None else array.integers()
        if len(found) != every or len(set(found) - {0}) > 1 or min(found) < 0:
            raise self.metadata.wrong(key, f"a list of {every} integers, each 0 or the same number")
        return found[: self.layers()]

    def check_layers(self, part: str, told: Sequence[int], what: str, name: str) -> None:
        """Raises ModelError unless just the layers `told` have the tensor `part`. what: it is of. name: of the metadata
        that tell so."""
        found = {i for i in layers_with(part, iter(self.shapes)) if i < self.layers()}
        if wrong := found ^ set(told):
            one = min(wrong)
            raise ModelError(
                f"{self.metadata.origin}: layer {one} {'has' if one in found else 'lacks'} {what} ({part}), other than "
                f"metadata {self.key(name)} says; convert the model again"
            )

    def kinds(self, period: int, *, full_first: bool = False) -> list[str]:
        """Kind of attention per layer, if one in `period` layers has no window: the last of them, or the first."""
        count, name = self.layers(), self.key("attention.sliding_window_pattern")
        if (flags := self.metadata.flags(name)) is not None:
            if len(flags) < count:
                raise self.metadata.wrong(name, f"a list of {count} flags")
            return ["sliding_attention" if flag else "full_attention" for flag in flags[:count]]
        full = 0 if full_first else period - 1
        return ["full_attention" if i % period == full else "sliding_attention" for i in range(count)]

    def no_window(self) -> None:
        if self.window():
            raise self.metadata.wrong(self.key("attention.sliding_window"), "0")

    def head_scalar(self, layers: int) -> float:
        """The number whose root divides scores: head elements or, for a model of `layers` layers, its share of the
        hidden size."""
        heads = self.metadata.same_integer(self.key("attention.head_count"))
        share = self.integer("embedding_length") // heads
        return float(share if self.integer("block_count") == layers else self.integer("attention.key_length", share))
