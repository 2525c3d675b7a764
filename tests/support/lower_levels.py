"""Prints a target of each ISA level below this machine's: `make test-levels` runs the tests as if it were that."""

from __future__ import annotations

from llmc.compiler.targets.cpu.target import TARGETS, native_target


def lower_levels(level: int) -> list[str]:
    """A target of each level below `level`, from the lowest."""
    first = {target.isa_level: name for name, target in reversed(TARGETS.items())}
    return [first[lower] for lower in range(1, level)]


if __name__ == "__main__":
    print(*lower_levels(native_target().isa_level))
