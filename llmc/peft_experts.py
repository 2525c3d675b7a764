"""How PEFT stores adapters of experts that are one tensor (`target_parameters`), for compiler and runtime.

Of a parameter of E experts, lora_A is [E·r, x] with an expert's rows together, and lora_B [y, r·E] with the experts'
columns of each rank together (`ParamWrapper` of PEFT 0.17 and later). Their names have the module, and not which of
its parameters it is: sizes tell. Most versions have A at an expert's inputs. Where a model stores experts in another
orientation than PEFT takes for granted, A is at its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from llmc.peft_format import layer_of
from llmc.shown import shown

_BASE = ".base_layer"
_EXPERTS, _DOWN, _UP = "experts", ("down",), ("gate", "up")

Array = npt.NDArray[Any]


class ExpertsError(ValueError):
    """An adapter does not fit the experts. advice: what to do, where no other model helps."""

    def __init__(self, why: str, advice: str = "") -> None:
        super().__init__(why)
        self.advice = advice


@dataclass(frozen=True)
class Names:
    """The names in a module of parameters that an adapter changes."""

    module: str
    names: tuple[str, ...]

    def plain(self, a: Array, rank_of: Callable[[str], float]) -> str | None:
        """The full name of a plain matrix, whose lora_A has as many rows as its configured rank; None of experts, which
        have more. rank_of: of a full name."""
        name = f"{self.module}.{self.names[0]}"
        return name if len(self.names) == 1 and a.shape[:1] == (rank_of(name),) else None


@dataclass(frozen=True)
class Parameter:
    """A pair of tensors of a module's parameter. a: lora_A. b: lora_B. names: of the parameters it may be."""

    module: str
    a: Array
    b: Array
    names: tuple[str, ...]


@dataclass(frozen=True)
class Matrices:
    """A layer's matrices of experts. key: the weight that has them. columns: inputs of one; rows: its outputs. down:
    whether their outputs are the layer's."""

    key: str
    experts: int
    rows: int
    columns: int
    down: bool


@dataclass(frozen=True)
class ExpertsChange:
    """The low-rank change of all experts: b[e] a[e] is added to expert e. a: [E, r, columns]. b: [E, rows, r].

    of: what it changes. parameter: the full name of the trained parameter, to which patterns of ranks and scales apply.
    """

    of: Matrices
    parameter: str
    a: Array
    b: Array

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


def parameter_names(targets: Iterable[str], name: str) -> Names | None:
    """Of the module behind the name of a wrapped one, which of `target_parameters` are its own; None if none is."""
    module, found = name.replace(_BASE, ""), list[str]()
    for target in targets:
        of, _, parameter = target.rpartition(".")
        # PEFT writes names without a module where it has fused an adapter's linear layers.
        fits = module == of or module.endswith(f".{of}") if of else module.rpartition(".")[2] == _EXPERTS
        if fits and parameter not in found:
            found.append(parameter)
    return Names(module, tuple(found)) if found else None


def changes_of(parameters: Sequence[Parameter], layers: Mapping[str, Sequence[Matrices]]) -> list[ExpertsChange]:
    """Which experts the parameters of one adapter change, and how. layers: what each has, by `layer_of` their names.

    Raises ExpertsError.
    """
    fits = [_fits(one, layers.get(layer_of(one.module), ())) for one in parameters]
    # A square matrix does not tell the side of A; others of the adapter do.
    told = {turned for found in fits if len(found) == 1 for _, turned in found}
    changes: dict[str, ExpertsChange] = {}
    for one, found in zip(parameters, fits, strict=True):
        if len(found) > 1:
            found = [(of, turned) for of, turned in found if turned in told]
        if len(found) != 1:
            raise ExpertsError(
                f"{shown(one.module)} has square matrices, and nothing tells which side lora_A is at",
                "merge the adapter with PEFT",
            )
        (of, turned), *_ = found
        if of.key in changes:
            raise ExpertsError(f"{shown(one.module)} changes the same experts twice")
        changes[of.key] = _change(one, of, turned)
    return list(changes.values())


def _fits(one: Parameter, matrices: Iterable[Matrices]) -> list[tuple[Matrices, bool]]:
    """What its names and sizes fit, and whether A is at the outputs there. Raises ExpertsError if there is nothing."""
    a, b = one.a.shape, one.b.shape
    found = []
    if len(a) == len(b) == 2 and a[0] == b[1] > 0:
        for of in matrices:
            if a[0] % of.experts == 0 and any(_may_be(name, of) for name in one.names):
                sizes = ((of.columns, of.rows), (of.rows, of.columns))
                found += [(of, turned) for turned, wanted in enumerate(sizes) if (a[1], b[0]) == wanted]
    if not found:
        raise ExpertsError(
            f"{shown(one.module)} has lora_A of {list(a)} and lora_B of {list(b)}, which fit no experts of its layer"
        )
    return [(of, bool(turned)) for of, turned in found]


def _may_be(name: str, of: Matrices) -> bool:
    """Whether a parameter's name can be that of these matrices: it says nothing, or the same."""
    down, up = (any(word in name for word in words) for words in (_DOWN, _UP))
    return down == of.down or not (down or up)


def _change(one: Parameter, of: Matrices, turned: bool) -> ExpertsChange:
    a = one.a.reshape(of.experts, -1, one.a.shape[1])
    b = one.b.reshape(len(one.b), -1, of.experts).transpose(2, 0, 1)
    if turned:
        a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    name = next(name for name in one.names if _may_be(name, of))
    return ExpertsChange(of, f"{one.module}.{name}", a, b)
