"""Biases of tokens as a value: a dictionary that cannot be changed, and has a hash."""

from __future__ import annotations

from typing import Any, NoReturn


class FixedBiases(dict[int, float]):
    """Biases by token id. A dictionary for everyone who reads it; equal ones have equal hashes in any order."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle of dictionaries sets the keys one by one.
        return FixedBiases, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("logit_bias cannot be changed: make other parameters by dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse
