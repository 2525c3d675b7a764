"""Traces one of several like layers. The others are marks in the trace, later replaced by copies of the traced layer.

Tracing and decomposition dominate lowering, and most layers differ only in weights and layer number. The first and the
last of like layers are traced, and the last must equal a copy of the first. This catches layers that use their number
for more than the `layer` attribute of ops.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from llmc.compiler.graph.nodes import llmc_op, schema_of
from llmc.models.blocks.layers import RepeatedBlock

MARKS = "llmc_layers"
"""The namespace of marks."""
_NUMBER = "layer"
"""The attribute that holds a layer's number, in modules and ops."""
_WEIGHTS = "weights_"
_OF_TORCH = frozenset(vars(nn.Module()))


def _copy_of(x: Tensor, *_: object) -> Tensor:
    return x.clone()


def _mark(name: str, schema: str) -> Callable[..., Tensor]:
    mark = torch.library.custom_op(f"{MARKS}::{name}", _copy_of, mutates_args=(), schema=schema)
    mark.register_fake(lambda x, *_: x.new_empty(x.shape))
    return mark


# x: the activation that the layer transforms. read: its other tensor arguments. at: its position.
_begin = _mark("begin", "(Tensor x, Tensor[] read, int at) -> Tensor")
_end = _mark("end", "(Tensor x, int at) -> Tensor")
_run = _mark("run", "(Tensor x, Tensor[] read, int at) -> Tensor")


def _facts(value: object, tensors: list[Tensor]) -> Hashable:
    """The properties of a value that a trace depends on; appends its tensors to `tensors`. An object that is not plain
    data equals only itself."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (*map(str, value.shape), value.dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_facts(getattr(value, f.name), tensors) for f in dataclasses.fields(value)))
    if isinstance(value, (tuple, list)):
        return (type(value), *(_facts(one, tensors) for one in value))
    if isinstance(value, dict):
        return tuple((name, _facts(one, tensors)) for name, one in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value), value)
    return id(value)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of the module and its submodules."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]


def _numbers(layer: nn.Module) -> tuple[int, ...]:
    """The numbers that the modules of a layer have, ascending: several if it has several layers of the KV cache."""
    return tuple(sorted({n for module in layer.modules() if type(n := vars(module).get(_NUMBER)) is int}))


def _kind(layer: nn.Module) -> Hashable:
    """A key that is equal for layers whose traces may differ only in weights and numbers."""
    numbers, found = _numbers(layer), list[Hashable]()
    for name, module in layer.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        if held.get(_NUMBER) in numbers:
            held[_NUMBER] = ("of several", numbers.index(held[_NUMBER]))
        found.append((name, type(module), _facts([held, module._parameters, module._buffers], [])))
    ids = [id(tensor) for tensor in _tensors_of(layer)]
    return (*found, *map(ids.index, ids))


@dataclass
class _Run:
    """Consecutive layers that are not traced. at: their positions. read: the tensor arguments of each."""

    at: list[int]
    read: list[Tensor]
    result: Tensor


@dataclass
class _Traced:
    """A layer between its marks. nodes: those that make tensors; sizes are the same in all like layers."""

    begin: Any
    nodes: list[fx.Node] = field(default_factory=list)
    end: Any = None

    @property
    def place(self) -> int:
        return int(self.begin.args[2])

    @property
    def result(self) -> Any:
        return self.end.args[0]


class Repeats:
    """Finds like layers of a model, and replaces the untraced ones with copies of the traced.

    weights: all weights of the model, by name. traced_weights: those passed to the trace; fewer inputs make a smaller
    program.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, RepeatedBlock)]
        self._numbers = [_numbers(layer) for layer in self._layers]
        alike: dict[Hashable, list[int]] = {}
        for at, layer in enumerate(self._layers):
            alike.setdefault(_kind(layer), []).append(at)
        # Of two like layers both are traced anyway. Weights are found by torch's names of their inputs.
        are_told_apart = len(set(map(_input_name, weights))) == len(weights)
        self._alike = [places for places in alike.values() if len(places) > 2] if are_told_apart else []
        self._first = {at: places[0] for places in self._alike for at in places}
        self._facts: dict[int, Hashable] = {}
        self._runs: dict[int, _Run] = {}
        self._last_run: _Run | None = None
        self._differ = False
        names = {id(tensor): name for name, tensor in weights.items()}
        self._own = [[names[id(tensor)] for tensor in _tensors_of(layer)] for layer in self._layers]
        self._weights = tuple(weights)
        others = {id(module) for places in self._alike for at in places[1:-1] for module in self._layers[at].modules()}
        read = {
            names[id(tensor)]
            for module in model.modules()
            if id(module) not in others
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }
        self.traced_weights = {name: tensor for name, tensor in weights.items() if name in read}

    @contextmanager
    def marked(self) -> Iterator[None]:
        """While it is open, calls of untraced layers leave marks."""
        traced = {at for places in self._alike for at in (places[0], places[-1])}
        for at in self._first:
            layer = self._layers[at]
            call = partial(self._call, layer.forward if at in traced else None, at)
            vars(layer)["forward"] = call
        try:
            yield
        finally:
            for at in self._first:
                del vars(self._layers[at])["forward"]

    def _call(self, forward: Callable[..., Tensor] | None, at: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Calls or marks the layer at position `at`. forward: of a traced layer, else None."""
        tensors: list[Tensor] = []
        facts = _facts([x, args, kwargs], tensors)
        ids = [id(tensor) for tensor in tensors]
        facts = (facts, tuple(map(ids.index, ids)))
        if self._facts.setdefault(self._first[at], facts) != facts:
            self._differ = True
        read = tensors[1:]
        if forward is None:
            return self._run(at, x, read)
        made = forward(_begin(x, read, at), *args, **kwargs)
        if not isinstance(made, Tensor) or _facts(made, []) != _facts(x, []):
            self._differ = True
            return made
        return _end(made, at)

    def _run(self, at: int, x: Tensor, read: list[Tensor]) -> Tensor:
        """Leaves one mark for a whole run of layers: marks also take time."""
        last = self._last_run
        # A run has one result; the rows inside it cannot be read.
        joins = last is not None and x is last.result and not self._layers[at].input_is_shared
        if joins and last is not None and list(map(id, read)) == list(map(id, last.read)):
            last.at.append(at)
            return x
        self._runs[at] = self._last_run = _Run([at], read, _run(x, read, at))
        return self._last_run.result

    def unfold(self, program: ExportedProgram) -> bool:
        """Replaces marks with copies of traced layers, and adds the weights left out.

        Returns False if layers that seemed alike are not; the program is then unusable.
        """
        found, runs = _marks_of(program.graph)
        traced = {layer.place: layer for layer in found}
        copied = [(run, at) for run in runs for at in self._runs[run.args[2]].at]
        called = [*(layer.place for layer in found), *(at for _, at in copied)]
        # A layer called twice, never, or before the first traced one cannot be copied.
        if self._differ or sorted(called) != sorted(self._first):
            return False
        if not all(traced[self._first[at]].end < run for run, at in copied):
            return False
        weights = self._add_weights(program)
        if not all(self._is_copy(traced[alike[0]], traced[alike[-1]], weights) for alike in self._alike):
            return False
        for run in runs:
            self._unfold(program.graph, run, traced, weights)
        for layer in found:
            for node in (layer.begin, layer.end):
                node.replace_all_uses_with(node.args[0])
                program.graph.erase_node(node)
        return True

    def _add_weights(self, program: ExportedProgram) -> dict[str, fx.Node]:
        """The node of each weight; missing ones are added, in the order that a full trace would give."""
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
        like = {
            name: mine
            for at, first in self._first.items()
            for name, mine in zip(self._own[at], self._own[first], strict=True)
        }
        found: dict[str, fx.Node] = {}
        before = [node for name, node in nodes.items() if not name.startswith(_WEIGHTS)][-1]
        for name in self._weights:
            wanted = _input_name(name)
            if name not in self.traced_weights:
                same = found[like[name]]
                with program.graph.inserting_after(before):
                    nodes[wanted] = program.graph.placeholder(wanted)
                nodes[wanted].meta = dict(same.meta)
                arg = TensorArgument(name=nodes[wanted].name)
                specs[wanted] = InputSpec(InputKind.USER_INPUT, arg, None)
            found[name] = before = nodes[wanted]
        program.graph_signature.input_specs[:] = [
            specs[node.name] for node in program.graph.find_nodes(op="placeholder")
        ]
        return found

    def _unfold(self, graph: fx.Graph, run: Any, traced: Mapping[int, _Traced], weights: Mapping[str, fx.Node]) -> None:
        x = run.args[0]
        with graph.inserting_before(run):
            for at in self._runs[run.args[2]].at:
                first = traced[self._first[at]]
                x = self._copied(graph, first, at, {**self._inputs(first, run, at, weights), first.begin: x})
        run.replace_all_uses_with(x)
        graph.erase_node(run)

    def _copied(self, graph: fx.Graph, first: _Traced, at: int, made: dict[fx.Node, Any]) -> Any:
        """The result of a copy of the first layer. made: what replaces each node that the first one reads."""
        for node in first.nodes:
            args, kwargs = self._arguments(node, lambda n: made.get(n, n), first.place, at)
            made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            made[node].meta = dict(node.meta)
        return made[first.result]

    def _is_copy(self, first: _Traced, last: _Traced, weights: Mapping[str, fx.Node]) -> bool:
        """Whether the last traced layer equals a copy of the first one in its place."""
        made = {**self._inputs(first, last.begin, last.place, weights), first.begin: last.begin}
        for node, theirs in zip(first.nodes, last.nodes, strict=False):
            wanted = self._arguments(node, lambda n: _known(made.get(n, n)), first.place, last.place)
            found = self._arguments(theirs, _known, last.place, last.place)
            if node.target != theirs.target or wanted != found:
                return False
            made[node] = theirs
        return len(first.nodes) == len(last.nodes) and made.get(first.result) is last.result

    def _inputs(self, first: _Traced, mark: Any, at: int, weights: Mapping[str, fx.Node]) -> dict[fx.Node, Any]:
        """What replaces each node that the first layer reads, for the layer at position `at`, called as its mark is."""
        read = zip(first.begin.args[1], mark.args[1], strict=True)
        own = zip(self._own[first.place], self._own[at], strict=True)
        return {**dict(read), **{weights[mine]: weights[theirs] for mine, theirs in own}}

    def _arguments(self, node: fx.Node, known: Callable[[fx.Node], Any], old: int, new: int) -> Any:
        """(args, kwargs) of a node, with nodes mapped by `known`, and the layer number at position `old` replaced by
        that at `new`, of several the one in its place."""
        args: Any = fx.map_arg(node.args, known)
        kwargs: Any = fx.map_arg(node.kwargs, known)
        schema = schema_of(node)
        if schema is None or llmc_op(node) is None:
            return args, kwargs

        def renumbered(number: int) -> int:
            own = self._numbers[old]
            return self._numbers[new][own.index(number)] if number in own else number

        for i, argument in enumerate(schema.arguments):
            if argument.name == _NUMBER and i < len(args):
                args = (*args[:i], renumbered(args[i]), *args[i + 1 :])
            elif argument.name == _NUMBER and _NUMBER in kwargs:
                kwargs = {**kwargs, _NUMBER: renumbered(kwargs[_NUMBER])}
        return args, kwargs


def _marks_of(graph: fx.Graph) -> tuple[list[_Traced], list[Any]]:
    """The traced layers, and the marks of runs, in order."""
    ops = torch.ops.llmc_layers
    traced: list[_Traced] = []
    runs: list[Any] = []
    inside: _Traced | None = None
    for node in graph.nodes:
        if node.target is ops.begin.default:
            inside = _Traced(node)
        elif node.target is ops.end.default and inside is not None:
            inside.end = node
            traced.append(inside)
            inside = None
        elif node.target is ops.run.default:
            runs.append(node)
        elif inside is not None and _makes_tensors(node):
            inside.nodes.append(node)
    return traced, runs


def _makes_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _known(node: fx.Node) -> Any:
    """A node argument in comparable form: sizes are equal whichever node computes them."""
    return node if _makes_tensors(node) else str(node.meta.get("val"))


def _input_name(weight: str) -> str:
    """The name that torch gives the input of a weight."""
    return _WEIGHTS + re.sub(r"[^a-zA-Z0-9]", "_", weight).lower()
