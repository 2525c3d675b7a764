"""Generic ops: row programs from plain torch, their kernels with guard bytes, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from llmc.compiler.config import CompileError
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.packing import pack_activation, unpack_activation
from llmc.compiler.targets.cpu.target import Target, native_target

from support.kernel_harness import run, targets_here
from support.marks import spread

pytestmark = pytest.mark.native

NATIVE = native_target()
CPUS = targets_here("cooperlake", "x86-64-v3")
on_cpus = pytest.mark.parametrize("target", CPUS, ids=lambda t: t.name)
ROWS, SEEN = 11, 9


def dtype_or_name(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else getattr(value, "name", None)


def rows_module(function: Callable[..., Tensor], *arguments: Tensor) -> Any:
    """The Relax module of a function, its ops fused to kernels; tensors of ROWS rows are token tensors."""
    from llmc.compiler.graph.importer import Importer
    from llmc.compiler.graph.passes.fuse import fuse_rows

    class Module(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return function(*values)

    tokens = torch.export.Dim("tokens", min=1, max=1 << 20)
    dims = tuple({0: tokens} if a.shape[0] == ROWS else None for a in arguments)
    program = torch.export.export(Module(), arguments, dynamic_shapes=(dims,), strict=False).run_decompositions()
    for node in [n for n in program.graph.nodes if n.name.startswith("_assert_tensor_metadata")]:
        program.graph.erase_node(node)
    importer = Importer()
    module = importer.run(program, {})
    symbol = next(str(p.ty.shape[0].name) for p in module["main"].params if hasattr(p.ty.shape[0], "name"))
    return fuse_rows(module, {symbol: "tokens"}, importer.describe)


def kernels(module: Any) -> list[tuple[KernelSpec, list[str], str]]:
    """Of each kernel in order: its spec, the variables it reads and the one it writes."""
    from tvm import relax

    from llmc.compiler.graph.passes.fuse import NAME, PROGRAM, calls_of_tir

    found = []
    for var, call in calls_of_tir(module["main"]):
        attrs = module[call.args[0]].attrs
        value = json.loads(str(attrs[PROGRAM]))
        del value["rows"]
        spec = KernelSpec.of("other", "fused", name=str(attrs[NAME]), program=json.dumps(value), rows=0, row_tile=4)
        found.append((spec, [a.name for a in call.args[1].fields if isinstance(a, relax.Var)], var.name))
    return found


def fused(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[KernelSpec, list[int]]:
    """The one kernel of a function, and which argument each input is."""
    module = rows_module(function, *arguments)
    ((spec, read, _),) = kernels(module)
    names = [p.name for p in module["main"].params]
    return spec, [names.index(name) for name in read]


def numpy_of(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def computed(spec: KernelSpec, target: Target, *arguments: Tensor, like: Tensor) -> NDArray[Any]:
    """Rows of the result for 1 and 3 tasks, which must agree; rows past SEEN stay as they were."""
    arrays = {f"in{i}": numpy_of(a.contiguous()) for i, a in enumerate(arguments)}
    outs = []
    for tasks in (1, 3):
        empty = np.full(like.numel() * like.element_size(), 0xA5, np.uint8)
        before = empty.view(numpy_of(like).dtype).reshape(like.shape)
        out = run(spec, target, {**arrays, "out0": before}, written=("out0",), scalars={0: SEEN}, num_tasks=tasks)
        outs.append(out["out0"])
        assert (outs[-1][SEEN:].view(np.uint8) == 0xA5).all()
    assert (outs[0].view(np.uint8) == outs[1].view(np.uint8)).all()
    return outs[0][:SEEN].astype(np.float32)


def x(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rms(t: Tensor, w: Tensor) -> Tensor:
    return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)


def heads(t: Tensor) -> Tensor:
    return torch.softmax(t.view(-1, 3, t.shape[1] // 3), -1).reshape(t.shape[0], -1)


def rotated(t: Tensor) -> Tensor:
    half = t.shape[1] // 2
    return torch.cat((-t[:, half:], t[:, :half]), -1)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "softcap": (lambda t: torch.tanh(t / 30.0) * 30.0, (x(ROWS, 600, scale=60.0),)),
    "gelu_tanh": (lambda t: F.gelu(t[:, :35], approximate="tanh") * t[:, 35:], (x(ROWS, 70),)),
    "gelu_erf": (lambda t: F.gelu(t), (x(ROWS, 66),)),
    "sigmoid": (lambda t: torch.sigmoid(t) * t, (x(ROWS, 33),)),
    "clamp_where": (lambda t: torch.where(t > 0.5, t.clamp(-1.0, 1.0), -t), (x(ROWS, 50),)),
    "pow": (lambda t: t.abs() ** 1.5 + t**3 - (1 + t.abs()) ** -2, (x(ROWS, 40),)),
    "log": (lambda t: torch.log(t.abs() + 1e-3), (x(ROWS, 40),)),
    "exp": (lambda t: torch.exp(t), (x(ROWS, 40),)),
    "add_weight": (lambda t, w: t * w + 1.0, (x(ROWS, 65), x(65, seed=1))),
    "rms": (rms, (x(ROWS, 65), x(65, seed=1))),
    "mean": (lambda t: t - t.mean(-1, keepdim=True), (x(ROWS, 129),)),
    "amax": (lambda t: t - t.amax(-1, keepdim=True), (x(ROWS, 45),)),
    "amin": (lambda t: t - t.amin(-1, keepdim=True), (x(ROWS, 45),)),
    "sum": (lambda t: t.sum(-1), (x(ROWS, 45),)),
    "softmax": (lambda t: torch.softmax(t, -1), (x(ROWS, 75),)),
    "softmax_heads": (heads, (x(ROWS, 60),)),
    "concat": (rotated, (x(ROWS, 60),)),
    "permute": (lambda t: t.view(-1, 4, 15).transpose(1, 2).reshape(-1, 60), (x(ROWS, 60),)),
    "positions": (lambda t, p: t * (p[:, None] % 3).float(), (x(ROWS, 20), torch.arange(ROWS, dtype=torch.int32))),
    "is_positive": (lambda t: t > 0.0, (x(ROWS, 37),)),
    "masked": (lambda t, m: t.masked_fill(m, -1.0), (x(ROWS, 37), x(ROWS, 37, seed=1) > 0)),
    "to_bf16": (lambda t: (t * 0.5).to(torch.bfloat16), (x(ROWS, 37),)),
    "from_bf16": (lambda t: t.float() * 2.0, (x(ROWS, 37).to(torch.bfloat16),)),
    "to_f16": (lambda t: (t * 5e4).to(torch.float16), (x(ROWS, 37),)),
    "from_f16": (lambda t: t.float() * 2.0, (x(ROWS, 37).to(torch.float16),)),
    "by_f16": (lambda t: t.to(torch.float16).float() + 1.0, (x(ROWS, 37, scale=1e-5),)),
}


@on_cpus
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_function_of_rows(target: Target, name: str) -> None:
    function, arguments = FUNCTIONS[name]
    expected = function(*arguments)
    spec, order = fused(function, *arguments)
    assert spec.symbol().startswith("fused_")
    found = computed(spec, target, *(arguments[i] for i in order), like=expected)
    exact = function(*(a.double() if a.dtype == torch.float32 else a for a in arguments))
    wanted = exact[:SEEN].float().numpy()
    if expected.dtype in (torch.bfloat16, torch.float16):
        assert (found == expected[:SEEN].float().numpy()).all()
    else:
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6 * float(np.abs(wanted).max()))


def with_layouts(spec: KernelSpec, row_tile: int, inputs: bool, outputs: bool) -> KernelSpec:
    """The kernel with all its inputs, or its outputs, packed by row tile."""
    params = spec.as_dict()
    program = json.loads(str(params["program"]))
    for tensors, packed in ((program["inputs"], inputs), (program["outputs"], outputs)):
        for tensor in tensors:
            tensor["packed"] = packed
    return KernelSpec.of(spec.family, spec.op, **{**params, "program": json.dumps(program), "row_tile": row_tile})


@spread("dtype, width", CPUS, [torch.float32, torch.bfloat16, torch.float16], [64, 38], ids=dtype_or_name)
def test_packed_layouts_change_no_bit(target: Target, dtype: torch.dtype, width: int) -> None:
    value = x(ROWS, width).to(dtype)
    function = lambda t: torch.sigmoid(t.float()).to(dtype)  # noqa: E731
    spec, _ = fused(function, value)
    plain = computed(spec, target, value, like=value)
    given = numpy_of(value)
    for row_tile in (1, 4):
        padded = np.zeros((-(-ROWS // row_tile) * row_tile, width), given.dtype)
        padded[:ROWS] = given
        for packed_in, packed_out in ((True, False), (False, True), (True, True)):
            kernel = with_layouts(spec, row_tile, packed_in, packed_out)
            empty = np.full(padded.shape, np.nan, given.dtype)
            arrays = {
                "in0": pack_activation(padded, row_tile) if packed_in else given,
                "out0": pack_activation(empty, row_tile) if packed_out else empty[:ROWS],
            }
            for tasks in (1, 3):
                out = run(kernel, target, arrays, written=("out0",), scalars={0: SEEN}, num_tasks=tasks)["out0"]
                rows = unpack_activation(out, SEEN, width) if packed_out else out[:SEEN]
                assert (rows.astype(np.float32) == plain).all()


@on_cpus
def test_a_row_has_the_same_bits_anywhere(target: Target) -> None:
    function, arguments = FUNCTIONS["softmax_heads"]
    spec, _ = fused(function, *arguments)
    turned = torch.flip(arguments[0], (0,))
    a = computed(spec, target, arguments[0], like=arguments[0])
    b = computed(spec, target, turned, like=turned)
    shared = range(ROWS - SEEN, SEEN)
    assert all((a[row] == b[ROWS - 1 - row]).all() for row in shared)
    assert len(shared) == 7


MIXING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "softmax": (lambda t: torch.softmax(t, 0), "reduces over the token rows"),
    "sum": (lambda t: t + t.sum(0), "reduces over the token rows"),
    "flip": (lambda t: t.flip(0), "mixes token rows"),
    "gram": (lambda t: (t @ t.T).sum(-1), "token"),
    "count": (lambda t: t * torch.arange(t.shape[0], dtype=torch.int32)[:, None], "of token rows"),
    "cumsum": (lambda t: t.cumsum(0), "single token rows"),
    "roll": (lambda t: t.roll(t.shape[0], 1), "depends on the number of token rows in the batch"),
    "transpose": (lambda t: t @ t.T @ t, "has the token rows on axis 1 of a tensor [20, s"),
    "pad": (lambda t: F.pad(t, (0, 0, 1, 0))[:-1], " + 1, 20], whose sizes are neither fixed nor one a token"),
}


@pytest.mark.parametrize("name", list(MIXING))
def test_an_op_that_mixes_tokens_is_refused(name: str) -> None:
    function, reason = MIXING[name]
    with pytest.raises(CompileError) as error:
        fused(function, x(ROWS, 20))
    message = str(error.value)
    assert reason in message
    assert all(part in message for part in ("op aten.", "node ", " to ["))
    assert "\n" not in message


@on_cpus
def test_kernels_need_no_library(target: Target, tmp_path: Path) -> None:
    from llmc.compiler.targets.cpu.kernels.codegen import compile_object
    from llmc.compiler.targets.cpu.kernels.registry import build_kernel
    from llmc.compiler.targets.elf.link import link_shared

    def everything(t: Tensor) -> Tensor:
        t = torch.tanh(t) + torch.exp(t) + torch.log(t.abs()) + torch.erf(t) + torch.sigmoid(t) + torch.sqrt(t.abs())
        return torch.floor(t) + torch.ceil(t) + torch.round(t) + t**2.5 + torch.softmax(t, -1)

    spec, _ = fused(everything, x(ROWS, 40))
    link_shared([compile_object(build_kernel(spec, target), target)], tmp_path / "kernels.so")
    listed = subprocess.run(["nm", "-D", tmp_path / "kernels.so"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.split()[-2] == "U"}
    assert names <= {"memcpy", "memset", "memmove"}
    assert spec.symbol() in listed


@on_cpus
@pytest.mark.parametrize(
    ("name", "low", "high"), [("tanh", -12.0, 12.0), ("erf", -6.0, 6.0), ("log", 1e-6, 1e6), ("sigmoid", -80.0, 80.0)]
)
def test_functions_are_accurate(target: Target, name: str, low: float, high: float) -> None:
    width = 4096
    values = torch.linspace(low, high, ROWS * width).view(ROWS, width)
    function = getattr(torch, name)
    spec, _ = fused(lambda t: function(t), values)
    found = computed(spec, target, values, like=values).astype(np.float64)
    exact = function(values.double())[:SEEN].numpy()
    assert float((np.abs(found - exact) / np.maximum(np.abs(exact), 1e-3)).max()) < 1e-6


NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 88.0, 88.5, 88.72, 89.0, 200.0, 3e38, -104.0, -3e38])
EDGES: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "relu": torch.relu,
    "clamp": lambda t: t.clamp(-1.0, 1.0),
    "maximum": lambda t: torch.maximum(t, t.flip(-1)),
    "minimum": lambda t: torch.minimum(t, t.flip(-1)),
    "softplus": lambda t: F.softplus(t),
}


@on_cpus
@pytest.mark.parametrize("name", list(EDGES))
def test_infinities_and_nan_are_those_of_torch(target: Target, name: str) -> None:
    function = EDGES[name]
    values = torch.stack([SPECIAL.roll(row) for row in range(ROWS)])
    spec, _ = fused(function, values)
    np.testing.assert_allclose(
        computed(spec, target, values, like=values), function(values)[:SEEN].numpy(), rtol=2e-6, atol=1e-37
    )


@on_cpus
@pytest.mark.parametrize("name", ["amax", "amin", "sum", "softmax"])
def test_a_nan_poisons_the_reduction_of_its_row_alone(target: Target, name: str) -> None:
    values = x(ROWS, 45)
    for row in range(0, ROWS, 2):
        values[row, (7 * row) % 45] = NAN
    functions: dict[str, Callable[[Tensor, int], Tensor]] = {
        "amax": torch.amax,
        "amin": torch.amin,
        "sum": torch.sum,
        "softmax": torch.softmax,
    }

    def function(t: Tensor) -> Tensor:
        return functions[name](t, -1)

    expected = function(values)
    spec, _ = fused(function, values)
    found = computed(spec, target, values, like=expected)
    np.testing.assert_allclose(found, expected[:SEEN].numpy(), rtol=2e-6, atol=1e-6)
    assert np.isnan(found[::2]).all()
    assert np.isfinite(found[1::2]).all()


def test_an_expression_of_many_tensors_becomes_several_kernels() -> None:
    values = [x(ROWS, 20, seed=seed) for seed in range(30)]
    module = rows_module(lambda *ts: sum_of_tanh(ts), *values)
    found = kernels(module)
    assert len(found) > 1
    assert max(len(read) + 1 for _, read, _ in found) <= 12
    known = {p.name: value for p, value in zip(module["main"].params, values, strict=True)}
    for spec, read, written in found:
        result = computed(spec, NATIVE, *(known[name] for name in read), like=values[0])
        known[written] = torch.cat([torch.from_numpy(result), torch.zeros(ROWS - SEEN, 20)])
    expected = sum_of_tanh([v.double() for v in values])[:SEEN]
    np.testing.assert_allclose(known[found[-1][2]][:SEEN].numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def sum_of_tanh(values: Sequence[Tensor]) -> Tensor:
    total = torch.tanh(values[0])
    for value in values[1:]:
        total = total + torch.tanh(value)
    return total


def test_an_op_of_too_many_tensors_is_refused() -> None:
    with pytest.raises(CompileError, match="more than 12 tensors, which is what a kernel can take; split it"):
        rows_module(lambda *ts: torch.cat(ts, -1), *(x(ROWS, 4, seed=seed) for seed in range(12)))
