"""An artifact with the same graphs, whose KV cache has layers of other sizes between those that its commands use."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmc.graphs_format import OPERAND_KINDS
from llmc.graphs_records import KvLayerRecord, OperandRecord
from llmc.runtime.graphs_file import read_graphs

from support.rewritten import rewritten

_POOLS = [OPERAND_KINDS.index(kind) for kind in ("k_pool", "v_pool")]
_OTHERS = (KvLayerRecord(192, 64), KvLayerRecord(320, 0))
"""Sizes that are not those of a model, and values that are a part of keys."""


def _moved(operand: OperandRecord) -> OperandRecord:
    return operand._replace(index=2 * operand.index + 1) if operand.kind in _POOLS else operand


def with_uneven_layers(artifact: Path, output: Path) -> Path:
    """A copy of an artifact of one rank: layer 2 n + 1 stands for layer n, and no command uses the others."""
    tables = read_graphs(artifact)
    own = [tables.kv_layer(layer) for layer in range(tables.model.num_layers)]
    layers = [of for layer, one in enumerate(own) for of in (_OTHERS[layer % len(_OTHERS)], one)]
    model = dataclasses.replace(tables.model, num_layers=len(layers))
    return rewritten(artifact, output, model=model, operand=_moved, kv_layers=layers)
