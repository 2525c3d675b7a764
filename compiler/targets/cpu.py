"""Exact CPU targets: what the instruction set offers and the tile sizes the kernel templates use on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class TargetError(ValueError):
    """A target name that llmc does not know, or that this machine cannot be."""


@dataclass(frozen=True)
class Target:
    """One instruction set level.

    isa_level: 1 x86-64-v3 (AVX2+FMA), 2 x86-64-v4 (AVX512 F/BW/DQ/VL), 3 + VNNI, 4 + AVX512-BF16, 5 + AMX-BF16.
    lanes: float32 lanes of a vector register; row_tile: rows of the largest register tile; panel_columns: columns of
    a packed weight panel (a multiple of lanes).
    """

    name: str
    mcpu: str
    isa_level: int
    lanes: int
    row_tile: int
    panel_columns: int
    bf16_dot: bool

    def row_tile_for(self, rows: int) -> int:
        """Row tile of a tensor of at most `rows` rows: the smallest power of two that holds them, capped."""
        tile = 1
        while tile < rows and tile < self.row_tile:
            tile *= 2
        return tile


def _avx512(name: str, mcpu: str, level: int) -> Target:
    return Target(name, mcpu, level, lanes=16, row_tile=8, panel_columns=48, bf16_dot=level >= 4)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("x86-64-v3", "x86-64-v3", 1, lanes=8, row_tile=4, panel_columns=16, bf16_dot=False),
        Target("haswell", "haswell", 1, lanes=8, row_tile=4, panel_columns=16, bf16_dot=False),
        _avx512("x86-64-v4", "x86-64-v4", 2),
        _avx512("skylake-avx512", "skylake-avx512", 2),
        _avx512("icelake-server", "icelake-server", 3),
        _avx512("cooperlake", "cooperlake", 4),
        _avx512("znver4", "znver4", 4),
        _avx512("znver5", "znver5", 4),
        _avx512("sapphirerapids", "sapphirerapids", 5),
    )
}

_LEVEL_FLAGS: tuple[tuple[int, str, frozenset[str]], ...] = (
    (5, "sapphirerapids", frozenset({"amx_bf16", "avx512_bf16", "avx512_vnni"})),
    (4, "cooperlake", frozenset({"avx512_bf16", "avx512_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    (3, "icelake-server", frozenset({"avx512_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vbmi2"})),
    (2, "x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    (1, "x86-64-v3", frozenset({"avx2", "fma", "f16c", "bmi2"})),
)


def native_target(cpuinfo: str = "/proc/cpuinfo") -> Target:
    """The best target that this machine runs. Raises TargetError on a CPU without AVX2."""
    flags: frozenset[str] = frozenset()
    vendor = ""
    for line in Path(cpuinfo).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = frozenset(value.split())
        elif key.strip() == "vendor_id":
            vendor = value.strip()
    for level, name, needed in _LEVEL_FLAGS:
        if needed <= flags:
            return TARGETS["znver4" if level == 4 and vendor == "AuthenticAMD" else name]
    raise TargetError("this CPU lacks AVX2 and FMA, which every llmc CPU target needs; compile for another machine")


def resolve_target(name: str) -> Target:
    """The target called `name`; `native` is this machine's. Raises TargetError naming the known ones."""
    if name == "native":
        return native_target()
    if name not in TARGETS:
        raise TargetError(f"unknown target {name!r}; known targets: native, {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
