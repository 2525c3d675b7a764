"""The lowered model: what remains of a trace without torch. Can be cached and read back."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import tvm
import tvm.script
from tvm import relax, tirx
from tvm.tirx.script.parser import entry

from llmc.compiler.graph.commands import Site

SITE_PREFIX = "llmc_site_"


@dataclass(frozen=True)
class Lowered:
    """The Relax module with symbolic shapes. params: names of main's parameters, graph inputs first."""

    module: tvm.IRModule
    sites: tuple[Site, ...]
    params: tuple[str, ...]


def to_bytes(lowered: Lowered) -> bytes | None:
    """Serializes a lowered model for the cache; None if it would not survive the round trip."""
    try:
        value = {
            "functions": _functions(lowered.module).script(show_meta=True),
            "main": _written(lowered.module["main"]),
            "sites": [asdict(site) for site in lowered.sites],
            "params": lowered.params,
        }
        payload = zlib.compress(json.dumps(value, separators=(",", ":")).encode())
        tvm.ir.assert_structural_equal(from_bytes(payload).module, lowered.module)
    except Exception:
        # Whatever the failure, the next compilation traces again.
        return None
    return payload


def from_bytes(payload: bytes) -> Lowered:
    """Reads `to_bytes` output. Attributes that were tuples become lists."""
    value = json.loads(zlib.decompress(payload))
    sites = tuple(Site(s["op"], s["attributes"], tuple(s["tensors"])) for s in value["sites"])
    return Lowered(_with_main(_read_functions(value["functions"]), value["main"]), sites, tuple(value["params"]))


def _functions(module: tvm.IRModule) -> tvm.IRModule:
    """All functions but main, as text: this TVM crashes when it writes a module with types as JSON."""
    return tvm.IRModule({var: func for var, func in module.functions_items() if var.name_hint != "main"})


class _WithoutStack:
    """The module inspect, but for the caller's frames."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: []) if name == "stack" else getattr(inspect, name)


def _read_functions(text: str) -> tvm.IRModule:
    """For each function, TVM looks up the source of all frames of its caller, which takes as long as reading the text,
    and uses them only for functions that are Python objects."""
    entry.inspect = _WithoutStack()
    try:
        return tvm.script.from_source(text, check_well_formed=False)
    finally:
        entry.inspect = inspect


def _written(main: relax.Function) -> dict[str, Any]:
    """A function that is one line of calls, as JSON. Raises ValueError on any other."""
    (block,) = main.body.blocks
    *bindings, last = block.bindings
    numbers = {var: i for i, var in enumerate((*main.params, *(b.var for b in bindings)))}

    def expr(value: Any) -> Any:
        if isinstance(value, relax.Var):
            return numbers[value]
        if isinstance(value, tvm.ir.GenericConst):
            return [value.value.numpy().item(), str(value.value.dtype)]
        if not isinstance(value, relax.Call):
            raise ValueError(f"{type(value).__name__} is no call")
        callee = value.args[0]
        kind = "site" if isinstance(callee, relax.ExternFunc) else "function"
        name = str(callee.global_symbol) if kind == "site" else callee.name_hint
        (made,) = value.ty_args
        return {kind: name, "args": [expr(field) for field in value.args[1].fields], "type": _type(made)}

    return {
        "params": [[param.name, _type(param.ty)] for param in main.params],
        "attributes": _plain(main.attrs or {}),
        "bindings": [expr(binding.value) for binding in bindings],
        "output": expr(last.value),
    }


def _type(made: relax.TensorType) -> list[Any]:
    """The dtype, then each dimension as an integer or a symbol's name."""
    dims = []
    for dim in made.shape:
        if not isinstance(dim, (tirx.IntImm, tirx.Var)):
            raise ValueError(f"{dim} is neither a number nor a symbol")
        dims.append(int(dim) if isinstance(dim, tirx.IntImm) else str(dim.name))
    return [str(made.dtype), *dims]


def _plain(value: Any) -> Any:
    """An attribute value as JSON."""
    if isinstance(value, (Mapping, tvm.ir.DictAttrs)):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, tvm.ir.Array)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, str) else int(value)


def _with_main(module: tvm.IRModule, main: Mapping[str, Any]) -> tvm.IRModule:
    """The module with the main function that `_written` serialized."""
    symbols: dict[str, tirx.Var] = {}

    def type_of(written: list[Any]) -> relax.TensorType:
        dtype, *dims = written
        shape = [symbols.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d for d in dims]
        return relax.TensorType(shape, dtype)

    def expr(written: Any) -> relax.Expr:
        if isinstance(written, int):
            return values[written]
        if isinstance(written, list):
            return relax.const(*written)
        args, made = [expr(one) for one in written["args"]], type_of(written["type"])
        if "site" in written:
            return relax.call_dps_packed(written["site"], args, made)
        return relax.call_tir(module.get_global_var(written["function"]), args, made)

    values = [relax.Var(name, type_of(written)) for name, written in main["params"]]
    builder = relax.BlockBuilder(module)
    with builder.function("main", list(values), attrs=main["attributes"]):
        with builder.dataflow():
            for written in main["bindings"]:
                values.append(builder.emit(expr(written)))
            output = builder.emit_output(expr(main["output"]))
        builder.emit_func_output(output)
    return builder.get()
