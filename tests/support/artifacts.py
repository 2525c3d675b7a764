"""Artifacts that tests share: made once a run, whichever worker asks first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY_LADDER = "prefill=[1,2]x[16,32],decode=[1,2]x[64]"


def shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its workers have."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The shared folder `name`, which the first worker that asks for it makes. Copy before changing."""
    root = shared(factory) / f"shared-{name}"
    done = root / "done"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            make(root)
            done.touch()
    return root


@dataclass(frozen=True)
class TinyArtifact:
    """A compiled tiny model, the checkpoint it came from and the cache that has its kernels. Copy before changing."""

    model: Path
    artifact: Path
    cache: Path


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
