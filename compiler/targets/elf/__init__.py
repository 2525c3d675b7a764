"""Shared by targets whose code is a shared library on the host: compiles kernels to objects and links them."""

from __future__ import annotations

from pathlib import Path

CODE_SOURCES = (Path(__file__).parent / "codegen.py",)
"""Sources that decide how TIR becomes code, for cache keys."""
