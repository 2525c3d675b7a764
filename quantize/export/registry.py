"""The layouts that are written, by the name of --format."""

from __future__ import annotations

from llmc.quantize.export.awq import Awq
from llmc.quantize.export.base import Layout, Wanted
from llmc.quantize.export.compressed_tensors import CompressedTensors
from llmc.quantize.export.gguf import Gguf
from llmc.quantize.export.gptq import Gptq
from llmc.quantize.formats.base import QuantizeError

LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (CompressedTensors, Gptq, Awq, Gguf)}


def layout_class(name: str) -> type[Layout]:
    """Raises QuantizeError for a name that there is not."""
    if name not in LAYOUTS:
        raise QuantizeError(f"--format {name!r} is unknown: use {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def get_layout(name: str, wanted: Wanted) -> Layout:
    """Raises QuantizeError for a name that there is not, and for what the layout does not hold."""
    return layout_class(name)(wanted)
