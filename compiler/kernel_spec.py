"""Identity of a kernel: a family and its static parameters. Equal specs share one compiled kernel."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

Param = int | float | str | bool
BUFFERS = "buffers"
"""Parameter that states the operand count of a kernel that no command calls."""


class KernelSpecError(ValueError):
    """No template can build this spec."""


@dataclass(frozen=True)
class KernelSpec:
    """All that a template needs to generate one kernel.

    family: one of `graphs_format.FAMILIES`; op: the template's name; params: sorted (name, value) pairs.
    """

    family: str
    op: str
    params: tuple[tuple[str, Param], ...]

    @classmethod
    def of(cls, family: str, op: str, **params: Param) -> KernelSpec:
        return cls(family, op, tuple(sorted(params.items())))

    def as_dict(self) -> dict[str, Param]:
        return dict(self.params)

    def symbol(self) -> str:
        """Stable C symbol: the op (or the parameter `name`, if present) and 12 hex digits of the spec's hash."""
        text = json.dumps([self.family, self.op, self.params], sort_keys=True)
        return f"{self.as_dict().get('name', self.op)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
