"""A graph as JSON data, Graphviz source, or an ONNX model for viewers."""

from __future__ import annotations

import json
import math
from typing import Any

from llmc.graphs_records import Graph, Tables
from llmc.runtime.graph_view import BufferView, CommandView, commands_of, group_of, memory_plan, role_of
from llmc.runtime.profile.costs import command_cost, kernel_params
from llmc.runtime.profile.steps import full_step

_COLOURS = {"linear": "#cfe2ff", "attention": "#ffd9c7", "rope": "#fff3bf", "norm": "#d8f5d0", "activation": "#e7dcf7"}

# Category names of Netron, which shows them beside a node. It colours only operators that it knows.
_CATEGORIES = {
    "linear": "Layer",
    "attention": "Attention",
    "rope": "Transform",
    "norm": "Normalization",
    "activation": "Activation",
    "embedding": "Transform",
    "gather": "Tensor",
}

_FOR_VIEWERS = (
    "For viewers such as Netron: no runtime can run this. Nodes are kernel calls of domain llmc; weights have shapes "
    "and no values, inputs but input_ids zeros."
)


class InspectError(RuntimeError):
    """A graph cannot be shown as requested."""


def graph_data(tables: Tables, graph: Graph, manifest: dict[str, Any]) -> dict[str, Any]:
    """Plain data of one graph: shapes, commands, and the memory plan (offsets and sizes in bytes).

    read_bytes, written_bytes, flops: of a step that fills the bucket. arena_live_bytes: of values still needed.
    """
    commands, params = commands_of(tables, graph), kernel_params(manifest)
    plan, step = memory_plan(commands), full_step(tables, graph)
    costs = [
        command_cost(tables, graph, raw, params.get(view.symbol, {}), step)
        for raw, view in zip(tables.commands_of(graph), commands, strict=True)
    ]
    first = next((c.index for c in commands if c.layer >= 0), 0)
    return {
        "bucket": graph.name,
        "max_tokens": graph.max_tokens,
        "max_seqs": graph.max_seqs,
        "max_samples": graph.max_samples,
        "max_blocks_per_seq": graph.max_blocks_per_seq,
        "row_unit": graph.row_unit,
        "arena_bytes": graph.arena_bytes,
        "commands": [
            {
                "index": c.index,
                "name": c.name,
                "kernel": c.symbol,
                "op": c.op,
                "family": c.family,
                "layer": c.layer,
                "group": group_of(c.layer, c.index, first),
                "barrier": c.barrier,
                "read_bytes": cost.read_bytes,
                "written_bytes": cost.written_bytes,
                "flops": cost.flops,
                "arena_live_bytes": sum(v.bytes for v in plan if v.first <= c.index <= v.last),
                "operands": [
                    {
                        "kind": b.kind,
                        "name": b.name,
                        "dtype": b.dtype,
                        "shape": list(b.shape),
                        "offset": b.offset,
                        "bytes": b.bytes,
                        "written": b.written,
                    }
                    for b in c.buffers
                ],
            }
            for c, cost in zip(commands, costs, strict=True)
        ],
        "memory_plan": [
            {
                "name": v.name,
                "dtype": v.dtype,
                "shape": list(v.shape),
                "offset": v.offset,
                "bytes": v.bytes,
                "first_command": v.first,
                "last_command": v.last,
            }
            for v in plan
        ],
    }


def _quote(text: str) -> str:
    # JSON keeps `\n`, which Graphviz reads as a line break, and escapes quotes as Graphviz expects.
    return json.dumps(text, ensure_ascii=False)


def graph_dot(tables: Tables, graph: Graph) -> str:
    """Graphviz source: one box per command, with its weights and inputs; one edge per computed value.

    Inputs have no edges: every layer reads them, and the edges would hide the flow of values.
    """
    lines = [
        f"digraph {_quote(graph.name)} {{",
        "  rankdir=TB; node [shape=box, fontname=sans, fontsize=11, style=filled];",
        "  edge [fontname=sans, fontsize=9, color=gray40, fontcolor=gray30];",
    ]
    sources: dict[str, str] = {}
    for c in commands_of(tables, graph):
        text = [f"{c.index}: {c.name}", c.symbol]
        text += [f"{b.name}  {b.type}" for b in c.buffers if b.kind == "weight"]
        text += [f"{b.name}  {b.type}" for b in c.buffers if b.kind == "input"]
        lines.append(
            f'  c{c.index} [label={_quote(chr(10).join(text))}, fillcolor="{_COLOURS.get(c.family, "#eeeeee")}"];'
        )
        for buffer in _reads(c):
            if buffer.name in sources:
                lines.append(f"  {sources[buffer.name]} -> c{c.index} [label={_quote(buffer.type)}];")
        for buffer in _writes(c):
            sources[buffer.name] = f"c{c.index}"
            if buffer.kind == "output":
                end = _quote(f"{buffer.name}\n{buffer.type}")
                lines.append(f"  out{c.index} [label={end}, shape=ellipse]; c{c.index} -> out{c.index};")
    return "\n".join([*lines, "}", ""])


def _reads(command: CommandView) -> list[BufferView]:
    # A pool that is written appears once, as the new version.
    return [b for b in command.buffers if not b.written]


def _writes(command: CommandView) -> list[BufferView]:
    return [b for b in command.buffers if b.written]


def _viewer_facts(command: CommandView) -> dict[str, str]:
    """Metadata for viewers: Netron reads `input_names`, Model Explorer folds nodes by `namespace`."""
    facts = {"input_names": f"[{', '.join(repr(role_of(command, b)) for b in _reads(command))}]"}
    if category := _CATEGORIES.get(command.family):
        facts["category"] = category
    return facts | {"namespace": command.name.rpartition(".")[0].replace(".", "/")}


def graph_onnx(tables: Tables, graph: Graph) -> bytes:
    """An ONNX model for viewers: one node of domain `llmc` per command, one edge per computed value.

    Every input of a step is declared. Viewers show a value with an initializer inside the node that reads it, with its
    shape. Weights have sparse initializers without values. Inputs except input_ids have zeros, because the checker
    rejects sparse inputs. The model says that it is for viewers only. Raises InspectError if the package onnx is
    missing.
    """
    try:
        import onnx
        from onnx import TensorProto, helper
    except ImportError:
        from llmc.distribution import install_compiler

        raise InspectError(f"the ONNX format needs the package onnx: {install_compiler()}") from None
    types = {
        "f32": TensorProto.FLOAT,
        "bf16": TensorProto.BFLOAT16,
        "f16": TensorProto.FLOAT16,
        "i8": TensorProto.INT8,
        "u8": TensorProto.UINT8,
        "i32": TensorProto.INT32,
    }

    def info(buffer: BufferView) -> Any:
        where = f", at byte {buffer.offset} of the arena" if buffer.kind == "arena" else ""
        text = f"{buffer.kind}, {buffer.bytes} bytes{where}"
        return helper.make_tensor_value_info(buffer.name, types[buffer.dtype], list(buffer.shape), doc_string=text)

    def without_data(buffer: BufferView) -> Any:
        values = helper.make_tensor(buffer.name, types[buffer.dtype], [0], b"", raw=True)
        indices = helper.make_tensor(f"{buffer.name}.indices", TensorProto.INT64, [0], [])
        return helper.make_sparse_tensor(values, indices, [int(extent) for extent in buffer.shape])

    def zeros(buffer: BufferView) -> Any:
        extents = [int(extent) for extent in buffer.shape]
        return helper.make_tensor(buffer.name, types[buffer.dtype], extents, bytes(4 * math.prod(extents)), raw=True)

    nodes: list[Any] = []
    constants: list[Any] = []
    defaults: list[Any] = []
    inputs: list[Any] = []
    between: list[Any] = []
    outputs: list[Any] = []
    known: set[str] = set()
    commands = commands_of(tables, graph)
    last_pool = {b.name.split(".")[0]: b.name for c in commands for b in _writes(c) if b.kind in ("k_pool", "v_pool")}
    for c in commands:
        for buffer in _reads(c):
            if buffer.name not in known:
                known.add(buffer.name)
                if buffer.kind != "weight":
                    inputs.append(info(buffer))
                if buffer.kind == "weight":
                    constants.append(without_data(buffer))
                elif buffer.kind == "input" and buffer.name != "input_ids":
                    defaults.append(zeros(buffer))
        for buffer in _writes(c):
            known.add(buffer.name)
            is_output = buffer.kind == "output" or buffer.name in last_pool.values()
            (outputs if is_output else between).append(info(buffer))
        node = helper.make_node(
            c.op,
            [b.name for b in _reads(c)],
            [b.name for b in _writes(c)],
            name=c.name,
            domain="llmc",
            kernel=c.symbol,
            family=c.family,
            layer=c.layer,
            barrier=int(c.barrier),
        )
        for key, value in _viewer_facts(c).items():
            node.metadata_props.add(key=key, value=value)
        nodes.append(node)
    name = graph.name.replace(":", "_")
    body = helper.make_graph(
        nodes,
        name,
        inputs,
        outputs,
        initializer=defaults,
        value_info=between,
        sparse_initializer=constants,
        doc_string=_FOR_VIEWERS,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("llmc", 1)]
    model = helper.make_model(body, producer_name="llmc", opset_imports=opsets, ir_version=10, doc_string=_FOR_VIEWERS)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
