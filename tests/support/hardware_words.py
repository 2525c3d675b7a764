"""Words for what only a CPU has, which no module but those of targets may say."""

from __future__ import annotations

import re

OF_A_CPU = re.compile(
    # Parts of names count as words: panel_columns.
    r"(?<![a-z0-9])(?:avx\w*|amx\w*|vnni|isa|lanes?|panels?|row[ _]tiles?|triples?|elf|(?<!\.)cc|gcc|llvm|mcpu|mattr"
    r"|instruction_sets?)(?![a-z])",
    re.IGNORECASE,
)
