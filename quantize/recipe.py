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
    """

    schemes: Mapping[str, Scheme]
    methods: Mapping[str, str] = field(default_factory=dict)

    def method(self, weight: str) -> str:
        """How its numbers came about."""
        return self.methods.get(weight, ROUNDED)

    def describe(self) -> str:
        """Which weights have which scheme, in one line that tells this recipe from any other of the same model."""
        users: dict[str, list[str]] = {}
        for name, scheme in self.schemes.items():
            users.setdefault(scheme.describe(), []).append(name)
        return "; ".join(f"{scheme}: {' '.join(sorted(names))}" for scheme, names in sorted(users.items()))

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
