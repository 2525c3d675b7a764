"""The scheme of each layer of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from llmc.quantize.formats.base import QuantizeError
from llmc.quantize.formats.scheme import Scheme
from llmc.quantize.scheme import get_scheme, regrouped

HEAD = "lm_head"
"""The kind of the output projection, even when it shares the embedding's weight."""
ROUNDED = "rtn"
"""Name of the method that rounds to nearest."""
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class QuantConfig:
    """A user's request. group_size, asymmetric: None keeps the scheme's own. skip: names or kinds left unquantized.

    Raises QuantizeError for errors that do not depend on the model.
    """

    scheme: str
    group_size: int | None = None
    asymmetric: bool | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.layers

    @cached_property
    def layers(self) -> Scheme:
        """The scheme of every layer except the output projection."""
        return regrouped(self.scheme, self.group_size, self.asymmetric)

    @cached_property
    def head(self) -> Scheme:
        return get_scheme(get_scheme(self.scheme).head)


def layer_of(weight: str) -> int:
    """The layer of a weight, by its name; −1 for none."""
    found = _LAYER.match(weight)
    return -1 if found is None else int(found[1])


def layer_kind(weight: str) -> str:
    """The part of a weight's name shared by all layers: `layers.3.mlp.down.weight` is of kind mlp.down."""
    return _LAYER.sub("", weight).removesuffix(".weight")


def _described(scheme: Scheme) -> str:
    """One line for people, and everything that identifies the format: kept graphs are found by it."""
    return f"{scheme.describe()} ({' '.join(map(str, scheme.weight.record().values()))})"


@dataclass(frozen=True)
class Recipe:
    """The schemes of a model's linear layers, by weight name; layers without an entry are not quantized.

    methods: the quantization method of a weight according to its checkpoint, if not rounding to nearest. act_order:
    weights packed in the checkpoint's column order. rows_of: producer → act-order weight. The producer's rows are
    packed in that weight's column order, so that its output is the weight's input as needed.
    """

    schemes: Mapping[str, Scheme]
    methods: Mapping[str, str] = field(default_factory=dict)
    act_order: frozenset[str] = frozenset()
    rows_of: Mapping[str, str] = field(default_factory=dict)

    def method(self, weight: str) -> str:
        """The method that quantized a weight."""
        return self.methods.get(weight, ROUNDED)

    @property
    def permuted(self) -> frozenset[str]:
        """The act-order weights whose input must be permuted to their column order."""
        return self.act_order.difference(self.rows_of.values())

    def order(self) -> str:
        """One line on weights packed in another order than the model computes in; empty if there are none."""
        orders = [f"act-order: {' '.join(sorted(self.act_order))}"] if self.act_order else []
        return "; ".join((*orders, *(f"{name} as columns of {of}" for name, of in sorted(self.rows_of.items()))))

    def describe(self) -> str:
        """One line with the scheme of each weight; unique among recipes of a model."""
        users: dict[str, list[str]] = {}
        for name, scheme in self.schemes.items():
            users.setdefault(_described(scheme), []).append(name)
        found = [f"{scheme}: {' '.join(sorted(names))}" for scheme, names in sorted(users.items())]
        return "; ".join((*found, *filter(None, (self.order(),))))

    @classmethod
    def of(cls, config: QuantConfig, linears: Iterable[str], head: str) -> Recipe:
        """Applies a request to a model. linears: names of all linear weights. head: weight of the output projection,
        possibly the embedding's.

        Raises QuantizeError if `config` skips a layer that the model lacks.
        """
        names = list(linears)
        kinds = {name: HEAD if name == head else layer_kind(name) for name in names}
        for wanted in config.skip:
            if wanted not in names and wanted not in kinds.values():
                known = ", ".join(dict.fromkeys(kinds.values()))
                raise QuantizeError(
                    f"--skip {wanted!r} is not a linear layer of this model; use a kind ({known}) or the name of a "
                    f"weight, like {names[0]}"
                )
        return cls(
            {
                name: config.head if name == head else config.layers
                for name in names
                if name not in config.skip and kinds[name] not in config.skip
            }
        )
