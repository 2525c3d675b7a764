"""Imports TVM without torch, an optional dependency of its that costs more than the rest."""

from __future__ import annotations

import importlib
import sys


def import_tvm() -> None:
    """Imports tvm; torch stays out unless it is there already, and can still be imported afterwards."""
    if "torch" in sys.modules or "tvm" in sys.modules:
        return
    # The documented way to say that there is no such module; TVM takes torch as optional.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tvm")
    finally:
        del sys.modules["torch"]
