"""The export layouts, by the name given to --format."""

from __future__ import annotations

from llmc.quantize.export.awq import Awq
from llmc.quantize.export.base import Layout, Wanted
from llmc.quantize.export.compressed_tensors import CompressedTensors
from llmc.quantize.export.gguf import Gguf
from llmc.quantize.export.gptq import Gptq
from llmc.quantize.export.mxfp4 import Mxfp4
from llmc.quantize.formats.base import QuantizeError

LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (CompressedTensors, Gptq, Awq, Mxfp4, Gguf)}


def layout_class(name: str) -> type[Layout]:
    """The class of layout `name`. Raises QuantizeError for an unknown name."""
    if name not in LAYOUTS:
        raise QuantizeError(f"--format {name!r} is unknown: use {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def get_layout(name: str, wanted: Wanted) -> Layout:
    """The layout `name` for a request. Raises QuantizeError for an unknown name or an unsupported request."""
    return layout_class(name)(wanted)
