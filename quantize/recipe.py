"""Which layer of a model gets which scheme."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from llmc.quantize.formats.base import QuantizeError
from llmc.quantize.formats.scheme import Scheme
from llmc.quantize.scheme import get_scheme, regrouped

HEAD = "lm_head"
"""The kind of the output projection, also where it has the embedding's weight."""
ROUNDED = "rtn"
"""The method of rounding to nearest."""
_LAYER = re.compile(r"^layers\.\d+\.")


@dataclass(frozen=True)
class QuantConfig:
    """A user's request. group_size, asymmetric: None is the scheme's own. skip: names or kinds left unquantized.

    Raises QuantizeError for what is wrong whatever the model is.
    """

    scheme: str
    group_size: int | None = None
    asymmetric: bool | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.layers

    @cached_property
    def layers(self) -> Scheme:
        """The scheme of every layer but the output projection."""
        return regrouped(self.scheme, self.group_size, self.asymmetric)

    @cached_property
    def head(self) -> Scheme:
        return get_scheme(get_scheme(self.scheme).head)


def layer_kind(weight: str) -> str:
    """What layers of a model have in common: `layers.3.mlp.down.weight` is of kind mlp.down."""
    return _LAYER.sub("", weight).removesuffix(".weight")


@dataclass(frozen=True)
class Recipe:
    """The schemes of a model's linear layers by the name of their weight; what is not in it is not quantized.

    methods: how the numbers of a weight came about, where it was not by rounding to nearest: what its checkpoint says.
    act_order: weights whose columns are packed in the order in which a checkpoint stores them. rows_of: what is packed
    with its rows in the order of the columns of such a weight, whose input it makes so; by name.
    """

    schemes: Mapping[str, Scheme]
    methods: Mapping[str, str] = field(default_factory=dict)
    act_order: frozenset[str] = frozenset()
    rows_of: Mapping[str, str] = field(default_factory=dict)

    def method(self, weight: str) -> str:
        """How its numbers came about."""
        return self.methods.get(weight, ROUNDED)

    @property
    def permuted(self) -> frozenset[str]:
        """The weights of act_order whose input must be put in their order."""
        return self.act_order.difference(self.rows_of.values())

    def order(self) -> str:
        """What is not packed in the order that the model computes with, in one line; empty: nothing."""
        orders = [f"act-order: {' '.join(sorted(self.act_order))}"] if self.act_order else []
        return "; ".join((*orders, *(f"{name} as columns of {of}" for name, of in sorted(self.rows_of.items()))))

    def describe(self) -> str:
        """Which weights have which scheme, in one line that tells this recipe from any other of the same model."""
        users: dict[str, list[str]] = {}
        for name, scheme in self.schemes.items():
            users.setdefault(scheme.describe(), []).append(name)
        found = [f"{scheme}: {' '.join(sorted(names))}" for scheme, names in sorted(users.items())]
        return "; ".join((*found, *filter(None, (self.order(),))))

    @classmethod
    def of(cls, config: QuantConfig, linears: Iterable[str], head: str) -> Recipe:
        """linears: names of all linear weights; head: that of the output projection, which may be the embedding's.

        Raises QuantizeError when `config` skips what the model does not have.
        """
        names = list(linears)
        kinds = {name: HEAD if name == head else layer_kind(name) for name in names}
        for wanted in config.skip:
            if wanted not in names and wanted not in kinds.values():
                known = ", ".join(dict.fromkeys(kinds.values()))
                raise QuantizeError(
                    f"--skip {wanted!r} is no linear layer of this model; use a kind ({known}) or the name of a "
                    f"weight, like {names[0]}"
                )
        return cls(
            {
                name: config.head if name == head else config.layers
                for name in names
                if name not in config.skip and kinds[name] not in config.skip
            }
        )
