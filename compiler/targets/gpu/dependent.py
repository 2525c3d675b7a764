"""Kernels in CUDA C++ that begin while the one before them ends (programmatic dependent launch). Imports no tvm.

Such a kernel lets the next one begin at once, and waits before it reads what an earlier one writes. A kernel that says
nothing of that itself waits first.
"""

from __future__ import annotations

import re

AWAIT = "llmc_await_earlier"
"""Function of the prelude that waits until all earlier kernels have ended. Every group calls it."""
_LET_BEGIN = "llmc_let_later_begin"
_WEIGHTS = frozenset({"weight", "scale", "zero", "offset", "step", "shift", "bias", "norm"})
"""Operands of a kernel that waits by itself that no kernel writes."""


def dependent_text(text: str) -> str:
    """The text of a kernel, made to begin early.

    `__restrict__` promises that nobody writes what a kernel only reads, as long as it runs. Compilers then read it
    before the kernel waits, or past the caches that waiting clears. So only operands that no kernel writes keep it.
    """
    head, body = text.split("{\n", 1)
    waits = f"{AWAIT}();" in body
    kept = _WEIGHTS if waits else frozenset()

    def promised(match: re.Match[str]) -> str:
        return match[0] if match[2] in kept else f"{match[1]} {match[2]}"

    head = re.sub(r"(\w+\*) __restrict__ (\w+)", promised, head)
    first = "".join(f"  {name}();\n" for name in (_LET_BEGIN, *(() if waits else (AWAIT,))))
    return f"{head}{{\n{first}{body}"
