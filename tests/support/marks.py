"""Cases of parametrized tests that make test leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llmc.compiler.targets.cpu.target import Target


def rare(*case: Any) -> Any:
    """A case like others that are run every time; make test-exhaustive runs it."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def on_levels(targets: Sequence[Target]) -> pytest.MarkDecorator:
    """With the highest and the lowest of `targets` every time. Those between share the code of one or the other; whole
    models and layers of quantized weights run on them every time."""
    between = targets[1:-1]
    cases = [rare(target) if target in between else target for target in targets]
    return pytest.mark.parametrize("target", cases, ids=lambda target: target.name)
