"""choose_experts: the experts of a token, best first, and their weights.

Numbers are ordered as in torch: NaN above all others, and the first of equal ones first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.definition import F32, I32, Argument, GraphParams, KernelCall, OpDef

TAKEN, _BARRED = -(1 << 31), -(1 << 31) + 1
"""Keys below that of any number: for an expert already chosen, and for one whose group was not chosen."""
SCALES = "expert_scales"
_ATTRIBUTES = ("top_k", "groups", "top_groups", "best_of_group", "normalised", "least_sum", "scale")
Element = Callable[[Any], Any]


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    scaled = (SCALES,) if SCALES in site.tensors else ()
    # Left out where there is none, so that kernels have the names that they had.
    more: dict[str, Param] = {"scaled": True} if scaled else {}
    more |= {"added_sum": added} if (added := float(site.attributes["added_sum"])) else {}
    spec = KernelSpec.of(
        "other",
        "choose_experts",
        experts=site.attributes["widths"]["choice"],
        rows=graph.rows(site)["rows"],
        **{name: site.attributes[name] for name in _ATTRIBUTES},
        **more,
    )
    return [KernelCall(spec, ("choice", "scores", *scaled, "out"))]


class ChoiceOfRow:
    """Emits the choice for one row, in scalar ints and floats, for any target."""

    def __init__(self, spec: KernelSpec) -> None:
        from tvm.script.ir_builder import tirx as T

        p = spec.as_dict()
        self.T, self._experts, self._top_k = T, int(p["experts"]), int(p["top_k"])
        self._groups, self._top_groups = int(p["groups"]), int(p["top_groups"])
        self._two, self._normalised = p["best_of_group"] == 2, bool(p["normalised"])
        self._least, self._added = float(p["least_sum"]), float(p.get("added_sum", 0.0))
        self._scale = float(p["scale"])
        self._keys, self._of_groups = self.keys_array(self._experts), self.keys_array(self._groups)
        self._weights = self._array(self._top_k, "float32")
        self._factors = self._array(self._top_k, "float32") if p.get("scaled") else self._weights

    def emit(
        self, choice: Element, score: Element, store: Callable[[Any, Any], Any], factor: Element | None = None
    ) -> None:
        """choice, score, factor: of an expert. store: takes an int32 and its position in the row."""
        T = self.T
        with self.each(self._experts) as e:
            self._put(self._keys, self._key(choice(e)), e)
        self.meet()
        if self._top_groups < self._groups:
            self._bar_groups(choice)
        total = self._cell(T.float32(0.0), "float32")
        with self.turns(self._top_k) as j:
            chosen = self.take_best(self._keys, self._experts)
            store(chosen, j)
            if factor is not None:
                self._put(self._factors, factor(chosen), j)
            self._put(self._weights, score(chosen), j)
            self._put(total, total[0] + self._weights[j], 0)
        divisor = self._cell(T.max(total[0], T.float32(self._least)), "float32")
        if self._added:
            self._put(divisor, divisor[0] + T.float32(self._added), 0)
        with T.serial(self._top_k) as j:
            weight = self._weights[j]
            if self._normalised:
                weight = weight / divisor[0]
            if self._scale != 1.0:
                weight = weight * T.float32(self._scale)
            if factor is not None:
                weight = weight * self._factors[j]
            store(T.reinterpret("int32", weight), j + self._top_k)

    def keys_array(self, size: int) -> Any:
        """Memory for keys of all experts, or of all groups."""
        return self._array(size, "int32")

    def each(self, count: int) -> AbstractContextManager[Any]:
        """Loops over 0 … count − 1, in any order."""
        return self.turns(count)

    def turns(self, count: int) -> AbstractContextManager[Any]:
        """Loops over 0 … count − 1, in order."""
        loop: AbstractContextManager[Any] = self.T.serial(count)
        return loop

    def meet(self) -> None:
        """What `each` wrote is seen behind it."""

    def _array(self, size: int, dtype: str) -> Any:
        return self.T.alloc_buffer((size,), dtype, scope="local")

    def _put(self, array: Any, value: Any, index: Any) -> None:
        self.T.buffer_store(array, value, [index])

    def _cell(self, value: Any, dtype: str = "int32") -> Any:
        cell = self._array(1, dtype)
        self._put(cell, value, 0)
        return cell

    def _key(self, value: Any) -> Any:
        """An int32 with the order of the float."""
        T = self.T
        bits = self._cell(T.reinterpret("int32", value))[0]
        magnitude = T.bitwise_and(bits, T.int32(0x7FFFFFFF))
        ordered = T.Select(bits < 0, -magnitude, bits)
        return T.Select(magnitude > T.int32(0x7F800000), T.int32(0x7FFFFFFF), ordered)

    def take_best(self, keys: Any, count: int) -> Any:
        """Position of the largest key, which is then marked as chosen."""
        T = self.T
        best, found = self._cell(T.int32(TAKEN)), self._cell(T.int32(0))
        with T.serial(count) as i, T.If(keys[i] > best[0]), T.Then():
            self._put(best, keys[i], 0)
            self._put(found, i, 0)
        self._put(keys, T.int32(TAKEN), found[0])
        return found[0]

    def _bar_groups(self, choice: Element) -> None:
        """Keeps the experts of the best groups. A group's score is its best expert's, or the sum of its best two."""
        T, of_group = self.T, self._experts // self._groups
        with self.each(self._groups) as g:
            one = self._cell(T.float32(float("-inf")), "float32")
            two = self._cell(T.float32(float("-inf")), "float32")
            with T.serial(of_group) as i:
                value = self._cell(choice(g * of_group + i), "float32")[0]
                self._put(two, T.Select(value > one[0], one[0], T.Select(value > two[0], value, two[0])), 0)
                self._put(one, T.Select(value > one[0], value, one[0]), 0)
            self._put(self._of_groups, self._key(one[0] + two[0] if self._two else one[0]), g)
        self.meet()
        with self.turns(self._top_groups):
            self.take_best(self._of_groups, self._groups)
        with self.each(self._experts) as e, T.If(self._of_groups[T.truncdiv(e, of_group)] != TAKEN), T.Then():
            self._put(self._keys, T.int32(_BARRED), e)
        self.meet()


def _reference(spec: KernelSpec) -> Any:
    from llmc.compiler.targets.reference.kernels.frame import Frame

    p = spec.as_dict()
    experts, width, scales = int(p["experts"]), 2 * int(p["top_k"]), {SCALES: "f32"} if p.get("scaled") else {}
    with (
        Frame(spec.symbol(), {"choice": "f32", "scores": "f32", **scales, "out": "i32"}) as k,
        k.share(k.scalar(int(p["rows"]))) as row,
    ):
        ChoiceOfRow(spec).emit(
            lambda e: k.raw("choice", row * experts + e),
            lambda e: k.raw("scores", row * experts + e),
            lambda value, j: k.put_raw("out", value, row * width + j),
            (lambda e: k.raw(SCALES, e)) if scales else None,
        )
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from llmc.compiler.targets.cpu.kernels import builder as b

    p = spec.as_dict()
    experts, width = int(p["experts"]), 2 * int(p["top_k"])
    scales = [(SCALES, "float32")] if p.get("scaled") else []
    buffers = [("choice", "float32"), ("scores", "float32"), *scales, ("out", "int32")]
    kernel = b.Kernel.of(spec.symbol(), buffers, target)
    with kernel as k, k.share(k.scalar(int(p["rows"]))) as row:
        ChoiceOfRow(spec).emit(
            lambda e: k["choice"][row * experts + e],
            lambda e: k["scores"][row * experts + e],
            lambda value, j: b.store(k["out"], value, row * width + j),
            (lambda e: k[SCALES][e]) if scales else None,
        )
    return kernel.function()


CHOOSE_EXPERTS = OpDef(
    "choose_experts",
    {"choice": Argument(2, F32), "scores": Argument(2, F32), SCALES: Argument(1, F32)},
    lambda call: ((call.shapes["choice"][0], 2 * call.values["top_k"]), I32[0]),
    _kernels,
    templates={"reference": _reference, "cpu": _cpu},
)
