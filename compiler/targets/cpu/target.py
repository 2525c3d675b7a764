"""Exact CPU targets: the instruction sets and tile sizes that kernel templates use."""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.targets.base import TargetError
from llmc.cpu_levels import NATIVE_TARGET, TARGET_LEVELS

# The instruction sets that each ISA level of FORMAT.md adds to the level below, by LLVM's names.
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"),
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    ("avx512vnni",),
    ("avx512bf16",),
    ("amx-tile", "amx-int8", "amx-bf16"),
)

# Instruction sets that LLVM would use by itself on some `mcpu`, and that no level promises.
_UNPROMISED = (
    "avx512bitalg",
    "avx512fp16",
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vp2intersect",
    "avx512vpopcntdq",
    "avxvnni",
    "gfni",
    "sse4a",
)


@dataclass(frozen=True)
class Target:
    """One CPU to compile for.

    mcpu: the CPU whose timings LLVM schedules for.
    instruction_sets: the only sets that kernels may use (LLVM's names).
    lanes: float32 lanes of a vector register. row_tile: rows in the largest register tile.
    panel_columns: columns of a packed weight panel (a multiple of lanes).
    """

    name: str
    mcpu: str
    instruction_sets: tuple[str, ...]
    lanes: int
    row_tile: int
    panel_columns: int

    @property
    def isa_level(self) -> int:
        """The ISA level that an artifact requires: the lowest in FORMAT.md with all the instruction sets."""
        return max(i for i, added in enumerate(_LEVELS, start=1) if not set(added).isdisjoint(self.instruction_sets))

    @property
    def mattr(self) -> tuple[str, ...]:
        """LLVM attributes that disable every other instruction set, so that the level holds for all code."""
        known = sorted({name for added in _LEVELS for name in added}.union(_UNPROMISED))
        return tuple(f"-{name}" for name in known if name not in self.instruction_sets)

    @property
    def bf16_dot(self) -> bool:
        """Whether kernels multiply bfloat16 pairs in one vector instruction.

        False where tile registers do it (Sapphire and Emerald Rapids): there the vector instruction takes two cycles,
        in which f32 multiply-adds do twice as much.
        """
        return "avx512bf16" in self.instruction_sets and not self.bf16_tiles

    @property
    def int8_dot(self) -> bool:
        """Whether kernels multiply unsigned by signed bytes, four at a time, in one instruction."""
        return "avx512vnni" in self.instruction_sets

    @property
    def int8_tiles(self) -> bool:
        """Whether kernels multiply signed by unsigned bytes in tile registers, which hold two row tiles of 8."""
        return "amx-int8" in self.instruction_sets

    @property
    def bf16_tiles(self) -> bool:
        """Whether linear layers of bf16 use tile registers."""
        return "amx-bf16" in self.instruction_sets

    def row_tile_for(self, rows: int) -> int:
        """The row tile for at most `rows` rows: the smallest power of two that holds them, capped at `row_tile`."""
        tile = 1
        while tile < rows and tile < self.row_tile:
            tile *= 2
        return tile


def _of_level(name: str, level: int) -> Target:
    sets = tuple(itertools.chain(*_LEVELS[:level]))
    if level == 1:
        return Target(name, name, sets, lanes=8, row_tile=4, panel_columns=16)
    return Target(name, name, sets, lanes=16, row_tile=8, panel_columns=48)


TARGETS: dict[str, Target] = {name: _of_level(name, level) for name, level in TARGET_LEVELS.items()}

# Linux names most instruction sets as LLVM does.
_CPUINFO_FLAGS = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "bmi": "bmi1", "lzcnt": "abm"} | {
    name: name.replace("-", "_") for name in _LEVELS[4]
}
# Best first: (target, vendor or "" for any, a flag that is also required). A Sapphire Rapids whose hypervisor hides AMX
# has avx512_fp16, and a bf16 dot product at half the rate of f32 multiply-adds; it is treated as icelake-server.
_NATIVE: tuple[tuple[str, str, str], ...] = (
    ("znver4", "AuthenticAMD", ""),
    ("sapphirerapids", "", ""),
    ("icelake-server", "GenuineIntel", "avx512_fp16"),
    ("cooperlake", "", ""),
    ("icelake-server", "", ""),
    ("x86-64-v4", "", ""),
    ("x86-64-v3", "", ""),
)


def native_target(cpuinfo: str | None = None) -> Target:
    """The best target that this machine runs, or the one that LLMC_NATIVE_TARGET names.

    cpuinfo: text of a Linux cpuinfo file that describes the CPU; None for this machine. Raises TargetError on a CPU
    without AVX2, or if the named target cannot run.
    """
    if cpuinfo is None and (taken := _taken_for()):
        return taken
    vendor, flags = _cpu(cpuinfo)
    for name, only_vendor, flag in _NATIVE:
        if only_vendor in ("", vendor) and _needed(TARGETS[name]) | ({flag} if flag else set()) <= flags:
            return TARGETS[name]
    raise TargetError("this CPU lacks AVX2 and FMA, which every llmc CPU target needs; compile for another machine")


def runs_here(target: Target, cpuinfo: str | None = None) -> bool:
    """Whether this machine, or the CPU that `cpuinfo` describes, runs code for the target. Raises TargetError as
    `native_target` does."""
    if cpuinfo is None and (taken := _taken_for()):
        return set(target.instruction_sets) <= set(taken.instruction_sets)
    return _needed(target) <= _cpu(cpuinfo)[1]


def _taken_for() -> Target | None:
    """The target that LLMC_NATIVE_TARGET names, or None."""
    name = os.environ.get(NATIVE_TARGET)
    if not name:
        return None
    known = [other for other, target in TARGETS.items() if _needed(target) <= _cpu()[1]]
    if name not in known:
        raise TargetError(f"{NATIVE_TARGET} is {name!r}; unset it, or name one that this CPU runs: {', '.join(known)}")
    return TARGETS[name]


def _needed(target: Target) -> frozenset[str]:
    """The Linux CPU flags for the target's instruction sets."""
    return frozenset(_CPUINFO_FLAGS.get(name, name) for name in target.instruction_sets)


def _cpu(cpuinfo: str | None = None) -> tuple[str, frozenset[str]]:
    """(vendor, flags) of the CPU."""
    vendor, flags = "", frozenset[str]()
    for line in Path(cpuinfo or "/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = frozenset(value.split())
        elif key.strip() == "vendor_id":
            vendor = value.strip()
    return vendor, flags


def enable(target: Target) -> None:
    """Requests from the operating system what this process needs to call a target's kernels.

    The runtime does the same when it opens an artifact. Raises TargetError if refused.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if set(_LEVELS[4]).isdisjoint(target.instruction_sets):
        return
    if ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0:
        raise TargetError(f"the operating system does not let this process use AMX, which {target.name} needs")
