"""Levels of CPUs (FORMAT.md): the level that each target requires, and what a level can do. For compiler and
runtime."""

from __future__ import annotations

from collections.abc import Mapping

NATIVE_TARGET = "LLMC_NATIVE_TARGET"
"""Environment variable that names a target; this machine is then treated as having only that target's instruction
sets."""

TARGET_LEVELS = {
    "x86-64-v3": 1,
    "haswell": 1,
    "x86-64-v4": 2,
    "skylake-avx512": 2,
    "icelake-server": 3,
    "cooperlake": 4,
    "znver4": 4,
    "znver5": 4,
    "sapphirerapids": 5,
}
"""Every target for CPUs, by name."""

PRODUCT_LEVELS = {"int8": 3, "bf16": 4}
"""The lowest level with an instruction that adds up several products of such numbers."""


def level_limit(environment: Mapping[str, str]) -> int | None:
    """The highest level to use; None if the environment sets no limit. Raises ValueError."""
    name = environment.get(NATIVE_TARGET)
    if not name:
        return None
    if name not in TARGET_LEVELS:
        raise ValueError(f"{NATIVE_TARGET} is {name!r}; unset it, or name one of {', '.join(sorted(TARGET_LEVELS))}")
    return TARGET_LEVELS[name]
