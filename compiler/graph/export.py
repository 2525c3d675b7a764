"""Module → torch.export ExportedProgram, once per model; the counts of tokens, samples and sequences are symbolic."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from llmc.compiler.graph.nodes import OWN, ops_of
from llmc.compiler.graph.repeats import MARKS, Repeats
from llmc.compiler.ops.eager import define_ops
from llmc.graphs_format import INPUTS, ROPE_AXES, ROPE_POSITIONS, STATE_FIELDS, STATE_SLOTS


class _WeightsAsInputs(nn.Module):
    """Calls a module with its weights as arguments, so that no weight becomes a constant of the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # A list hides the module: its parameters must not be captured a second time.
        self._hidden = [model]

    def forward(self, inputs: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> torch.Tensor:
        # Inputs that only some models have are given by name.
        count, names = len(INPUTS), _inputs(self._hidden[0])
        others = dict(zip(names[count:], inputs[count:], strict=True))
        out: torch.Tensor = torch.func.functional_call(self._hidden[0], weights, tuple(inputs[:count]), others)
        return out


@dataclass(frozen=True)
class Exported:
    """A traced model. inputs: names of its graph inputs. weights: parameter and buffer names, in the order of the
    program's weight inputs."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    weights: tuple[str, ...]


def model_weights(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Every parameter and buffer by name; a tied parameter appears once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def export_model(model: nn.Module, *, every_layer: bool = False) -> Exported:
    """Exports `model` to a program of ops that the importer knows; weights may be on the meta device.

    every_layer: trace each layer instead of copying repeated ones. The program is the same.
    """
    define_ops()
    weights = dict(model_weights(model))
    if not every_layer:
        repeats = Repeats(model, weights)
        with repeats.marked():
            program = _traced(model, repeats.traced_weights)
        program = _decomposed(program)
        if repeats.unfold(program):
            return Exported(program, _inputs(model), tuple(weights))
    return Exported(_decomposed(_traced(model, weights)), _inputs(model), tuple(weights))


def _inputs(model: nn.Module) -> tuple[str, ...]:
    states = (STATE_SLOTS,) if getattr(model, "has_states", False) else ()
    axes = (ROPE_POSITIONS,) if getattr(model, "on_axes", False) else ()
    return (*INPUTS, *states, *axes)


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Decomposes ATen ops into the core ops that TVM knows; skips models that consist of llmc ops alone."""
    if {namespace for namespace, _, _ in ops_of(program)} <= {OWN, MARKS}:
        return program
    with warnings.catch_warnings():
        # torch copies the program in a way that it deprecates itself.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        program = program.run_decompositions()
    for node in [n for n in program.graph.nodes if n.name.startswith("_assert_tensor_metadata")]:
        program.graph.erase_node(node)
    return program


def _traced(model: nn.Module, weights: dict[str, torch.Tensor]) -> ExportedProgram:
    """Traces the model. The symbolic dimensions are the same for any number of layers."""
    tokens, samples, seqs, width = (Dim(n, min=1, max=1 << 20) for n in ("tokens", "samples", "seqs", "max_blocks"))
    bounds = Dim("query_bounds", min=2, max=1 << 20)
    dims = {
        "input_ids": {0: tokens},
        "positions": {0: tokens},
        "slot_mapping": {0: tokens},
        "block_tables": {0: seqs, 1: width},
        "context_lens": {0: seqs},
        "query_start": {0: bounds},
        "sample_index": {0: samples},
        "token_seq": {0: tokens},
        STATE_SLOTS: {0: seqs},
        ROPE_POSITIONS: {0: tokens},
    }
    shapes = {
        "input_ids": (24,),
        "positions": (24,),
        "slot_mapping": (24,),
        "block_tables": (6, 7),
        "context_lens": (6,),
        "query_start": (5,),
        "sample_index": (3,),
        "token_seq": (24,),
        STATE_SLOTS: (6, STATE_FIELDS),
        ROPE_POSITIONS: (24, ROPE_AXES),
    }
    device = next(iter(weights.values())).device
    names = _inputs(model)
    inputs = [torch.zeros(shapes[name], dtype=torch.int32, device=device) for name in names]
    with torch.no_grad():
        return torch.export.export(
            _WeightsAsInputs(model),
            (inputs, weights),
            dynamic_shapes=([dims[name] for name in names], dict.fromkeys(weights)),
            strict=False,
        )
