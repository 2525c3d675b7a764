"""Shared by targets whose code is a shared library on the host: compiles kernels to objects and links them."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

CODE_SOURCES = (_HERE / "codegen.py", _HERE.parent / "tir_steps.py")
"""Sources that decide how TIR becomes code, for cache keys."""
