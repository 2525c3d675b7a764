"""Cases of parametrized tests that make test leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llmc.compiler.targets.cpu.target import Target


def rare(*case: Any, id: str | None = None) -> Any:
    """A case like others that are run every time; make test-exhaustive runs it."""
    return pytest.param(*case, marks=pytest.mark.exhaustive, id=id)


def _name(value: Any) -> str | None:
    return getattr(value, "name", None)


def spread(
    names: str, targets: Sequence[Target], *axes: Sequence[Any], ids: Callable[[Any], str | None] = _name
) -> pytest.MarkDecorator:
    """The product of `targets` and `axes`, of which the highest and the lowest target have every value of every axis
    every time, in other company. names: of the parameters behind `target`; a value that is a tuple is of several."""
    cases = []
    for target in targets:
        shift = int(target is targets[-1])
        usual = {
            tuple((at + shift * place) % len(axis) for place, axis in enumerate(axes))
            for at in range(max(map(len, axes)))
            if target not in targets[1:-1]
        }
        for places in itertools.product(*(range(len(axis)) for axis in axes)):
            values = [axis[place] for axis, place in zip(axes, places, strict=True)]
            case = [target, *itertools.chain(*(v if isinstance(v, tuple) else (v,) for v in values))]
            cases.append(pytest.param(*case) if places in usual else rare(*case))
    return pytest.mark.parametrize(f"target, {names}", cases, ids=ids)


def mostly_highest(
    names: str, targets: Sequence[Target], both: Sequence[Any], highest: Sequence[Any], seldom: Sequence[Any] = ()
) -> pytest.MarkDecorator:
    """Cases of `both` on the highest and the lowest of `targets` every time, of `highest` on the former alone, of
    `seldom` on none. names: of the parameters in front of `target`."""
    cases = []
    for target in targets:
        usual = [*both, *highest] if target is targets[0] else both if target is targets[-1] else []
        cases += [(pytest.param if case in usual else rare)(*case, target) for case in (*both, *highest, *seldom)]
    return pytest.mark.parametrize(f"{names}, target", cases, ids=_name)


def on_levels(targets: Sequence[Target]) -> pytest.MarkDecorator:
    """With the highest and the lowest of `targets` every time. Those between share the code of one or the other; whole
    models and layers of quantized weights run on them every time."""
    between = targets[1:-1]
    cases = [rare(target) if target in between else target for target in targets]
    return pytest.mark.parametrize("target", cases, ids=lambda target: target.name)
