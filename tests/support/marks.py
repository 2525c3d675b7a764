"""Cases of parametrized tests that make test leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def rare(*case: Any) -> Any:
    """A case like others that are run every time; make test-exhaustive runs it."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)
