"""TVM's ONNX importer with known sizes: everything that depends only on them and on given inputs is computed at import.

The remaining nodes depend on the tokens' values. TVM imports each; errors name the node.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from llmc.models.brief import brief, brief_name
from llmc.models.convert import DTYPES as FLOATS
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.onnx.blocks import OPERATOR as BLOCKS
from llmc.models.sources.onnx.blocks import PARTS
from llmc.models.sources.onnx.contrib import CONVERTERS
from llmc.models.sources.onnx.file import OnnxFile
from llmc.models.sources.onnx.fused import FUSED, Call, NotWrittenOut
from llmc.models.sources.onnx.probe import TOKENS, TYPES, Inputs
from llmc.models.sources.onnx.quantized import REFUSED

_MATRIX_READERS = {"MatMul": 2, "FusedMatMul": 2, "Gemm": 2, "Gather": 1, "Attention": 2}
"""Number of leading inputs of each op that are matrices if they are initializers."""
_PASSED_ON = ("Cast", "Transpose", "Identity")
_KEEPS_TOKENS = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze")
_SHORT = (FLOATS["f16"], FLOATS["bf16"])
_LARGEST_CONSTANT_BYTES = 1 << 29


@dataclass(frozen=True)
class Table:
    """Rows of a matrix that are added to something. name: of the initializer. indices: row numbers, shaped like the
    values without the last axis."""

    name: str
    indices: Array


@dataclass(frozen=True)
class Given:
    """The meaning of a parameter of the imported function. Exactly one applies: matrix: an initializer. past: a cache.
    ids: token or type ids. array: known values, with their name in the graph and the table whose rows they are."""

    matrix: str | None = None
    past: str | None = None
    ids: str | None = None
    array: Array | None = None
    name: str = ""
    table: Table | None = None


def matrices_of(file: OnnxFile) -> frozenset[str]:
    """Initializers that are weights of linear layers or embeddings; they are not read before packing."""
    names = {
        name
        for name, tensor in file.initializers.items()
        if len(tensor.dims) == 2 and (dtype := file.dtype(name)) is not None and dtype.kind not in "iub"
    }
    of = {name: name for name in names}
    found: set[str] = set()
    for node in file.model.graph.node:
        inputs = [of.get(name) for name in node.input]
        if node.op_type in _PASSED_ON and inputs and inputs[0] is not None:
            of[node.output[0]] = inputs[0]
        found.update(name for name in inputs[: _MATRIX_READERS.get(node.op_type, 0)] if name is not None)
    return frozenset({*found, *file.blocks})


def node_called(node: onnx.NodeProto) -> str:
    """A node for errors, as in `node /model/layers.0/Add (Add)`."""
    kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"node {brief_name(node.name or node.output[0])} ({brief_name(kind)})"


class Imported(ONNXGraphImporter):  # type: ignore[misc]
    """One import.

    function: of Relax. given: its parameters, by name. outputs: the graph's outputs that the function computes, by
    name. known: computed values, by name.
    Raises ModelError naming a node that cannot be imported.
    """

    def __init__(self, file: OnnxFile, inputs: Inputs, matrices: frozenset[str]) -> None:
        super().__init__({}, "float32", sanitize=False)
        self._file, self.inputs, self._matrices = file, inputs, matrices
        self.opset = file.opset
        self.known: dict[str, Array] = {}
        self.given: dict[str, Given] = {}
        self._ids: dict[str, str] = {}
        self._tables: dict[str, Table] = {}
        # Known values before rounding to 16 bits: rotation angles need full precision.
        self._exact: dict[str, Array] = {}
        self._made: list[tuple[int, onnx.NodeProto]] = []
        self._parameters: list[relax.Var] = []
        self._variables: dict[str, relax.Var] = {}
        self._used: set[str] = set()
        self.function = self._import()

    def _import(self) -> relax.Function:
        graph = self._file.model.graph
        for name, array in self.inputs.values.items():
            self.known[name] = array
            if name in (TOKENS, TYPES):
                self._ids[name] = name
        self._used = _needed(graph, self._file.read_outputs)
        try:
            return self._function()
        except BaseException:
            # It warns of builder blocks left open.
            self.bb._end_block()
            raise

    def _function(self) -> relax.Function:
        graph = self._file.model.graph
        printed = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), self.bb.function("main"):
            warnings.simplefilter("ignore")
            with self.bb.dataflow():
                for node in graph.node:
                    if any(name in self._used for name in node.output):
                        self._node(node)
                names = [name for name in self._file.read_outputs if name in self._nodes]
                output = self.bb.emit_output(relax.Tuple([self._nodes[name] for name in names]))
            self.bb.emit_func_output(output, params=self._parameters)
        self.outputs = {name: self._nodes[name] for name in names}
        return self.bb.get()["main"]

    def called(self, variable: str) -> str:
        """The node from which a variable of the function comes."""
        number = _number(variable)
        for made, node in self._made:
            if number is not None and made >= number:
                return node_called(node)
        return f"{variable} of the imported graph"

    def _node(self, node: onnx.NodeProto) -> None:
        if (node.domain.removeprefix("ai.onnx"), node.op_type) in REFUSED:
            raise self._wrong(node, "has quantized numbers that llmc does not read: give the float model and --quant")
        names = [name for name in node.input if name]
        if (node.domain, node.op_type) == BLOCKS:
            # The inputs of a matrix are read when it is packed.
            names = [name for i, name in enumerate(node.input) if name and i not in PARTS]
        for name in names:
            self._load(name)
        if (node.domain, node.op_type) in FUSED:
            self._write_out(node)
        elif node.op_type in ("Shape", "Size") and node.input[0] not in self.known:
            self._size(node)
        elif all(name in self.known for name in names):
            self._compute(node)
        elif self._looks_up(node):
            self._look_up(node)
        else:
            self._convert(node)

    def _write_out(self, node: onnx.NodeProto) -> None:
        """Expands a fused operator."""
        shapes = [self._shape_of(name) if name in self.known or name in self._nodes else None for name in node.input]
        call = Call(node, shapes, [self.known.get(name) for name in node.input])
        try:
            written = FUSED[node.domain, node.op_type](call)
        except NotWrittenOut as error:
            raise self._wrong(node, f"{error}, which no model of llmc does") from None
        except (ValueError, IndexError, TypeError) as error:
            raise self._wrong(node, f"does not fit its inputs: {brief(str(error))}") from None
        self.known.update(written.constants)
        for one in written.nodes:
            self._node(one)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name in self.known:
            return tuple(self.known[name].shape)
        return tuple(int(dim) for dim in self._nodes[name].ty.shape)

    def _load(self, name: str) -> None:
        """Loads an initializer; a matrix only by shape."""
        if name in self.known or name in self._nodes:
            return
        if name in self.inputs.past:
            self._parameter(name, self.inputs.past[name], self.inputs.dtypes[name], Given(past=name))
        elif name in self._matrices:
            dtype = self._file.dtype(name)
            if dtype not in FLOATS.values():
                raise ModelError(
                    f"{self._file.path}: tensor {brief_name(name)} is of type {dtype}; export the model in float32, "
                    "float16 or bfloat16"
                )
            self._parameter(name, self._file.shape(name), str(dtype), Given(matrix=name))
        elif name in self._file.initializers:
            array = self._file.array(name)
            if array.nbytes > _LARGEST_CONSTANT_BYTES:
                raise ModelError(
                    f"{self._file.path}: tensor {brief_name(name)} of shape {list(array.shape)} is neither the weight "
                    "of a linear layer nor an embedding, and too large for anything else"
                )
            self.known[name] = array
        else:
            raise ModelError(f"{self._file.path}: nothing makes the value {brief_name(name)}; export the model again")

    def _parameter(self, name: str, shape: tuple[int, ...], dtype: str, given: Given) -> relax.Var:
        var = relax.Var(f"p{len(self._parameters)}", relax.TensorType(list(shape), dtype))
        self._parameters.append(var)
        self.given[var.name] = given
        self._nodes[name] = var
        return var

    def _size(self, node: onnx.NodeProto) -> None:
        sizes = self._nodes[node.input[0]].ty.shape
        if not all(isinstance(dim, (int, tirx.IntImm)) for dim in sizes):
            raise ModelError(
                f"{self._file.path}: node {brief_name(node.name)} ({node.op_type}) asks for a size that depends on "
                "values, as that of the tokens of an expert does, which no model of llmc read from ONNX has"
            )
        shape = [int(dim) for dim in sizes]
        if node.op_type == "Size":
            self.known[node.output[0]] = np.array(np.prod(shape), np.int64)
            return
        bounds = {a.name: a.i for a in node.attribute}
        self.known[node.output[0]] = np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)

    def _compute(self, node: onnx.NodeProto) -> None:
        names = [name for name in node.input if name]
        values = {name: self.known[name] for name in names}
        graph = onnx.helper.make_graph(
            [node],
            "node",
            [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names)],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        opsets = {entry.domain: entry.version for entry in self._file.model.opset_import}

        def computed(values: dict[str, Array]) -> list[Array]:
            with np.errstate(all="ignore"):
                if node.op_type == "GatherElements":
                    return [_gathered(node, values[names[0]], values[names[-1]])]
                return list(map(np.asarray, ReferenceEvaluator(graph, opsets=opsets).run(None, values)))

        try:
            results = computed(values)
            if names and names[0] in self._exact and node.op_type in _KEEPS_TOKENS and node.op_type != "Cast":
                self._exact[node.output[0]] = computed({**values, names[0]: self._exact[names[0]]})[0]
        except Exception as error:
            raise self._wrong(node, f"cannot be computed: {_last_line(error)}") from error
        self.known.update(zip((name for name in node.output if name), results, strict=True))
        if node.op_type in _KEEPS_TOKENS and names:
            self._keep(node, names[0])
        back = names[:1] and names[0] in self._exact and results[0].dtype == np.float32
        if node.op_type == "Cast" and (back or results[0].dtype in _SHORT):
            exact = self._exact.get(names[0], values[names[0]])
            if exact.dtype == np.float32:
                self._exact[node.output[0]] = exact

    def _keep(self, node: onnx.NodeProto, source: str) -> None:
        """Ids and table rows keep that role when only their shape changes."""
        name = node.output[0]
        if source in self._ids:
            self._ids[name] = self._ids[source]
        table, shape = self._tables.get(source), self.known[name].shape
        if table is not None and shape[-1:] == self.known[source].shape[-1:]:
            self._tables[name] = Table(table.name, table.indices.reshape(shape[:-1]))

    def _looks_up(self, node: onnx.NodeProto) -> bool:
        """Whether the node selects rows of a matrix other than by ids."""
        if node.op_type != "Gather" or node.input[0] not in self._matrices:
            return False
        return node.input[1] in self.known and node.input[1] not in self._ids

    def _look_up(self, node: onnx.NodeProto) -> None:
        """Selects matrix rows at known positions."""
        name, indices = node.input[0], self.known[node.input[1]]
        rows, axis = self._file.shape(name)[0], next((a.i for a in node.attribute if a.name == "axis"), 0)
        if axis != 0 or (indices.size and not -rows <= indices.min() <= indices.max() < rows):
            raise self._wrong(node, f"takes rows that a matrix of {rows} rows has not")
        indices = np.where(indices < 0, indices + rows, indices)
        self.known[node.output[0]] = self._file.array(name)[indices]
        self._tables[node.output[0]] = Table(name, indices)

    def _convert(self, node: onnx.NodeProto) -> None:
        arguments = _Arguments(None if not name else self._value(name) for name in node.input)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        convert = CONVERTERS.get((node.domain.removeprefix("ai.onnx"), node.op_type))
        try:
            if convert is not None:
                made = convert(self.bb, arguments, attributes)
            elif node.op_type in _get_convert_map():
                made = self._convert_operator(node.op_type, arguments, attributes, self.opset)
            else:
                raise self._wrong(node, "is not supported")
            results = self._emitted(made)
        except ModelError:
            raise
        except Exception as error:
            raise self._wrong(node, f"cannot be imported: {_last_line(error)}") from error
        for name, result in zip(node.output, results, strict=False):
            if name:
                self._nodes[name] = result
                number = _number(result.name) if isinstance(result, relax.Var) else None
                if number is not None:
                    self._made.append((number, node))

    def _emitted(self, made: Any) -> list[Any]:
        made = self.bb.normalize(made)
        if isinstance(made, relax.Tuple):
            return [self._bound(field) for field in made.fields]
        if isinstance(made.ty, relax.TupleType):
            whole = self._bound(made)
            return [self.bb.emit(relax.TupleGetItem(whole, i)) for i in range(len(made.ty.fields))]
        return [self._bound(made)]

    def _bound(self, made: Any) -> Any:
        return made if isinstance(made, relax.Var) else self.bb.emit(made)

    def _value(self, name: str) -> Any:
        """A node's input. Numbers and integer lists become constants, which many converters require."""
        if name in self._nodes:
            return self._nodes[name]
        array = self.known[name]
        if array.size == 1 or (array.ndim <= 1 and array.dtype.kind in "iu" and name not in self._ids):
            return relax.const(np.array(array), str(array.dtype))
        if name not in self._variables:
            given = Given(
                array=self._exact.get(name, array), name=name, table=self._tables.get(name), ids=self._ids.get(name)
            )
            var = relax.Var(f"p{len(self._parameters)}", relax.TensorType(list(array.shape), str(array.dtype)))
            self._parameters.append(var)
            self.given[var.name] = given
            self._variables[name] = var
        return self._variables[name]

    def _wrong(self, node: onnx.NodeProto, why: str) -> ModelError:
        return ModelError(f"{self._file.path}: {node_called(node)} {why}")


class _Arguments(list[Any]):
    """Missing inputs are None, as converters expect."""

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int) and item >= len(self):
            return None
        return super().__getitem__(item)


def _last_line(error: Exception) -> str:
    """The error's last line, without TVM's traces before it."""
    return brief((str(error).strip().splitlines() or [type(error).__name__])[-1])


def _gathered(node: onnx.NodeProto, data: Array, indices: Array) -> Array:
    """GatherElements; ONNX's reference fails for some shapes."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    some = tuple(slice(size) if i != axis % data.ndim else slice(None) for i, size in enumerate(indices.shape))
    return np.take_along_axis(data[some], indices, axis)


def _needed(graph: onnx.GraphProto, outputs: Iterable[str]) -> set[str]:
    """Names of everything that these outputs depend on."""
    needed = set(outputs)
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(node.input)
    return needed


def _number(variable: str) -> int | None:
    """The number in a variable's name (lv, lv1, lv2, …, in order of creation)."""
    found = re.fullmatch(r"lv(\d*)", variable)
    return int(found[1] or 0) if found else None
