"""--weight-memory of the commands that make an engine."""

from __future__ import annotations

import enum

WEIGHT_HELP = "Place of the weights: their mapped file, or huge pages, copied at the start; auto: copied as steps run."


class WeightMemory(enum.StrEnum):
    """The names of llmc.runtime.binding.devices.WEIGHT_MEMORY."""

    auto = "auto"
    mapped = "mapped"
    copied = "copied"
