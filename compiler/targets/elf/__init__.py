"""What targets share whose code is a shared library for the host to load: objects of kernels, and linking them."""

from __future__ import annotations

from pathlib import Path

CODE_SOURCES = (Path(__file__).parent / "codegen.py",)
"""What decides how TIR becomes code, for keys of the cache."""
