"""Where things are: the checkout, and material beside it that tests use if it is there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Real models, tokenizers and traces; tests of them skip where the folder is absent."""
