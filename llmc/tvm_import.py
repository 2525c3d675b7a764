"""Imports TVM without torch, an optional dependency that is slower to import than everything else."""

from __future__ import annotations

import importlib
import sys


def import_tvm() -> None:
    """Imports tvm. torch is not imported along, but can still be imported later."""
    if "torch" in sys.modules or "tvm" in sys.modules:
        return
    # The documented way to mark a module as missing; TVM treats torch as optional.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tvm")
    finally:
        del sys.modules["torch"]
