"""Words for what only a CPU has, which no part of the compiler but its targets may say."""

from __future__ import annotations

import re

OF_A_CPU = re.compile(
    r"\b(?:avx\w*|amx\w*|vnni|isa|lanes?|panels?|row[ _]tiles?|triples?|elf|cc|gcc|llvm|mcpu|mattr)\b", re.IGNORECASE
)
