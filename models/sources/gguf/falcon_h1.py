"""Falcon-H1 as llama.cpp's files have it: names of its tensors, and what their metadata say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.errors import ModelError
from llmc.models.layout import Layout
from llmc.models.sources.gguf import mamba
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader

LAYOUT = Layout(mamba=mamba.LAYOUT)
OF_LAYERS = {**mamba.OF_LAYERS, "ffn_norm": f"{LAYOUT.mlp_norm}.weight"}
"""Tensors of a layer, theirs to those of a checkpoint; one lacks the suffix there."""
_APART = "ssm.has_mup"


def _read(read: Reader) -> dict[str, Any]:
    """Multipliers are in matrices and biases. llama.cpp gates before it norms, and its steps have no bounds."""
    read.no_window()
    if read.flag(_APART, False):
        raise ModelError(
            f"{read.metadata.origin}: metadata {read.key(_APART)} says that multipliers are not in the weights, as in "
            "files for llama.cpp before it had Falcon-H1; convert the model again"
        )
    net = mamba.read_sizes(read)
    return {
        **read.eps(),
        **mamba.fields_of(net),
        "mamba_d_ssm": net.inner,
        "projectors_bias": bool(layers_with("ssm_out.bias", iter(read.shapes))),
        "mamba_rms_norm": bool(layers_with("ssm_norm.weight", iter(read.shapes))),
        "mamba_norm_before_gate": False,
    }


FALCONS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {"falcon-h1": _read}
