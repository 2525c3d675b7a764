"""The IR spec: what breaks it is named, with what it is and what it should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.ir_spec import verify_calls, verify_lowered, verify_operand, verify_site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.ops.experts import EXPERTS
from llmc.compiler.ops.registry import OPS
from llmc.compiler.targets.cpu.kernels.sources import TEMPLATE_FILES


def tensor(dtype: str, *shape: object) -> Any:
    return SimpleNamespace(ty=SimpleNamespace(dtype=dtype, shape=shape))


def test_every_llmc_op_has_a_spec() -> None:
    # No model calls these: passes and templates put them in the place of others.
    made = {"fused", "linear_quant", "gated_linear_quant", "embedding_quant", "quantize_rows", "permute_columns",
            "merge_attention", "expert_order", "expert_gather", "expert_linear", "expert_linear_quant",
            "expert_quantize", "expert_activate", "expert_combine", "adapter_pairs", "adapter_pick", "adapter_shrink",
            "adapter_expand", "adapter_samples", "activate", "all_reduce", "all_gather",
            "activated_linear_quant"}  # fmt: skip
    # The template of a linear has activations, too; experts have several.
    traced = {name for name, op in OPS.items() if op.traced and "cpu" not in op.templates}
    assert traced - {"gated_linear", "activated_linear", "experts"} == set(TEMPLATE_FILES) - made
    assert {name for name, op in OPS.items() if not op.traced} <= made


def test_a_site_of_the_right_types_passes() -> None:
    verify_site("rms_norm", "n", {"x": tensor("float32", "tokens", 64), "weight": tensor("float32", 64)})
    verify_site("linear", "n", {"x": tensor("bfloat16", "tokens", 64), "weight": tensor("bfloat16", 32, 64)})


@pytest.mark.parametrize(
    ("op", "name", "found", "message"),
    [
        (
            "rms_norm",
            "x",
            tensor("bfloat16", "tokens", 64),
            "node rms_norm_3: argument x of llmc::rms_norm is bfloat16 ['tokens', '64']; it must be float32 of rank 2",
        ),
        (
            "linear",
            "weight",
            tensor("float32", 8, 4, 2),
            "node rms_norm_3: argument weight of llmc::linear is float32 ['8', '4', '2']; "
            "it must be float32 or bfloat16 or float16 of rank 2",
        ),
        (
            "embedding",
            "ids",
            tensor("int64", "tokens"),
            "node rms_norm_3: argument ids of llmc::embedding is int64 ['tokens']; it must be int32 of rank 1",
        ),
    ],
)
def test_a_wrong_tensor_of_a_site_is_named(op: str, name: str, found: Any, message: str) -> None:
    with pytest.raises(CompileError) as error:
        verify_site(op, "rms_norm_3", {name: found})
    assert str(error.value) == message


def test_a_packed_activation_of_another_dtype_is_named() -> None:
    norm, linear = Site("rms_norm", {}, ("x", "weight")), Site("linear", {}, ("x", "weight"))
    verify_operand(norm, "x", "float32", "bf16")  # the input of a norm is no packed activation
    verify_operand(norm, "out", "bfloat16", "bf16")
    verify_operand(linear, "x", "float32", "f32")
    for site, name in ((norm, "out"), (linear, "x")):
        with pytest.raises(CompileError) as error:
            verify_operand(site, name, "float32", "bf16")
        assert str(error.value) == (
            f"tensor {name} of llmc::{site.op} is float32 in a graph of bf16 activations; "
            "convert it with .to(torch.bfloat16) in the model"
        )


def lowered(module: Any, num_sites: int = 1) -> Lowered:
    return Lowered(module, (Site("rms_norm", {}, ("x",)),) * num_sites, ("x",))


def calls(symbol: str) -> Any:
    """A module whose main calls an external function."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.call_dps_packed(symbol, x, x.ty))
        builder.emit_func_output(out)
    return builder.get()


def test_an_op_that_calls_other_kernels_than_it_says_is_named() -> None:
    verify_calls(EXPERTS, {*EXPERTS.kernel_names, "expert_quantize"})
    verify_calls(EXPERTS, EXPERTS.quantized_calls)
    with pytest.raises(CompileError, match=r"op experts says that it calls .*expert_order.* and calls linear: mend"):
        verify_calls(EXPERTS, ["linear"])


def test_sites_of_the_model_pass() -> None:
    verify_lowered(lowered(calls(f"{SITE_PREFIX}0")))


@pytest.mark.parametrize("symbol", [f"{SITE_PREFIX}1", f"{SITE_PREFIX}x", "printf"])
def test_a_call_of_anything_else_is_named(symbol: str) -> None:
    with pytest.raises(CompileError, match=f" calls {symbol}, which is not a site of this model"):
        verify_lowered(lowered(calls(symbol)))


@I.ir_module
class Doubled:
    # TVMScript: parsed, not run, so its annotations are no types.
    @R.function  # type: ignore[untyped-decorator]
    def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):  # type: ignore[valid-type]
        with R.dataflow():
            total = R.add(x, x)
            R.output(total)
        return total


def test_an_op_that_was_not_legalised_is_named() -> None:
    with pytest.raises(CompileError, match=r"^total is a call of .*relax\.add.*, which was not legalised$"):
        verify_lowered(lowered(Doubled))


def test_a_function_without_a_row_program_is_named() -> None:
    legal = relax.transform.LegalizeOps()
    with pytest.raises(CompileError, match=r"^total calls add, which is not a function of rows$"):
        verify_lowered(lowered(legal(Doubled)))
