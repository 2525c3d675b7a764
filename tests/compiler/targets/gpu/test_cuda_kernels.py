"""The kernels of GPUs in CUDA C++: nvcc builds all of some models, and none spills registers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.registry import OPS
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.cuda_prelude import FULL
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.graphs_format import ADDS_BIAS, ADDS_RESIDUAL
from llmc.quantize import QuantConfig
from llmc.quantize.formats.integers import Integers
from llmc.tvm_import import import_tvm

from support.compiled import compile_tiny
from support.families import CASES
from support.paged_attention import attention_params, merge_params
from support.sass import find_nvdisasm, listings
from support.tiny_models import make_tiny_model

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
_WIDE = attention_params(32, 8, 128, "bf16", "bf16", 128, 0)
_LATENT = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "rank": 512, "key_scales": 2, "scale": 0.1}
_ROTATION = {"rotary_dim": 128, "qk_norm": True, "norm_eps": 1e-6}
_ATTENTION = {
    "decode": KernelSpec.of("attention", "paged_attention", **_WIDE, segments=32),
    "prefill": KernelSpec.of("attention", "paged_attention", **_WIDE, segments=0, runs=True),
    "rotated": KernelSpec.of("attention", "rotated_attention", **_WIDE, segments=32, **_ROTATION),
    "rotated whole": KernelSpec.of("attention", "rotated_attention", **_WIDE, segments=0, **_ROTATION),
    "widest": KernelSpec.of(
        "attention", "paged_attention", **attention_params(32, 4, 512, "bf16", "bf16", 128, 0), segments=0, runs=True
    ),
    "latent": KernelSpec.of(
        "attention", "latent_attention", **_LATENT, kv_dtype="bf16", block_size=128, segments=32, runs=True
    ),
    "merge": KernelSpec.of("attention", "merge_attention", **merge_params(_WIDE), segments=32),
}
"""Of models as wide as they are."""

_DELTA = {"heads": 32, "key_heads": 16, "tiled": False}
_STATES = {
    f"{name}, {size}": spec
    for size in (24, 64, 128, 256)
    for name, spec in {
        "delta rule": KernelSpec.of("attention", "delta_rule", key_dim=size, value_dim=128, **_DELTA),
        "selective state": KernelSpec.of(
            "attention", "selective_state", heads=64, head_dim=64, groups=8, state_size=size
        ),
    }.items()
}


def specs_of(artifact: Path) -> list[KernelSpec]:
    kernels = json.loads((artifact / "manifest.json").read_text())["kernels"]
    found = []
    for kernel in kernels:
        params = tuple((name, value) for name, value in json.loads(kernel["components"]["params"]))
        spec = next(
            s
            for family in ("embedding", "norm", "linear", "rope", "attention", "activation", "gather", "other")
            if (s := KernelSpec(family, kernel["op"], params)).symbol() == kernel["symbol"]
        )
        found.append(spec)
    return found


_ADAPTERS = {"lora_slots": 2, "lora_rank": 8}
_MODELS: dict[str, tuple[str, str | None, dict[str, int]]] = {
    "floats": ("qwen3", None, _ADAPTERS),
    "integers": ("qwen3", "w8a8", {}),
    "latent attention": ("deepseek_v2-lite", "w4a16", {}),
    "adapters of heads": ("deepseek_v2-lite", None, _ADAPTERS),
    "experts": ("mixtral", None, {**_ADAPTERS, "lora_experts": True}),
}
_SAMPLE = {f"sample_{part}" for part in ("best", "draw", "edit", "feed", "mask", "rank", "scan", "sum", "top")}
_ADAPTER = {"adapter_expand", "adapter_pick", "adapter_samples", "adapter_shrink"}
_COMMON = _SAMPLE | {"embedding", "gather_rows", "rms_norm"}
_PLAIN = {"paged_attention", "rope_kv_write", "rotated_attention"}
_EXPERTS = {"choose_experts", "expert_combine", "expert_gather", "expert_order", "fused"}
_OPS = {
    "floats": _COMMON | _PLAIN | _ADAPTER | {"activate", "linear"},
    "integers": _COMMON | _PLAIN | {"linear_quant", "quantize_rows"},
    "latent attention": _COMMON | _EXPERTS | {
        "expert_linear_quant", "head_linear", "latent_attention", "latent_kv_write", "linear", "linear_quant",
        "packed_head_linear",
    },
    "adapters of heads": _COMMON | _EXPERTS | _ADAPTER | {
        "activate", "expert_linear", "head_linear", "latent_attention", "latent_kv_write", "linear",
    },
    "experts": _COMMON | _PLAIN | _ADAPTER | _EXPERTS | {"adapter_pairs", "expert_activate", "expert_linear", "linear"},
}  # fmt: skip
"""Of the kernels of each model."""
_OTHERS = [
    KernelSpec.of("embedding", "embedding_quant", dim=96, vocab=500, **Integers(8).kernel_params()),
    KernelSpec.of(
        "other", "expert_quantize", dim=96, act_dtype="bf16", group_size=32, sum_factor=1, experts=4, top_k=2, rows=0
    ),
    KernelSpec.of("other", "held_experts", top_k=4, rows=0),
    KernelSpec.of("other", "permute_columns", dim=96, act_dtype="bf16", rows=0),
    KernelSpec.of("gather", "pool_rows", dim=96, mean=True),
    KernelSpec.of("other", "rank_sum", rows=2, ranks=3, width=96, adds=ADDS_BIAS | ADDS_RESIDUAL),
    *(KernelSpec.of("other", op, dim=96) for op in ("beside_states", "gather_rows_leaving", "read_states")),
    *(
        KernelSpec.of("other", "placed_rows", dim=96, width=288, first=first, added=added)
        for first, added in ((0, False), (96, True))
    ),
    KernelSpec.of("other", "rope_rows", dim=128, axes="012" * 20 + "0" * 4),
    KernelSpec.of("other", "row_numbers"),
    KernelSpec.of("gather", "gather_rows", dim=96, count=4),
    KernelSpec.of("other", "spread_logits", dim=37, out=600),
    KernelSpec.of("other", "short_conv", channels=96, stride=128, taps=4),
    KernelSpec.of("other", "short_conv", channels=96, stride=96, taps=3, bias=True, activation="none"),
    KernelSpec.of("attention", "delta_rule", heads=4, key_heads=2, key_dim=128, value_dim=128, tiled=False),
    KernelSpec.of("attention", "selective_state", heads=4, head_dim=64, groups=2, state_size=128),
]
"""Kernels that neither these models have nor `_ATTENTION`."""


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize("name", list(_MODELS))
def test_kernels_are_built_without_spills(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Of floats with adapters, of integers, and of experts and latent attention."""
    case, scheme, more = _MODELS[name]
    family, fields = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **fields)
    options = {"buckets": "prefill=[1]x[16],decode=[1]x[32]", "dtype": "bf16", "target": "opencl", **more}
    if scheme is not None:
        options["quant"] = QuantConfig(scheme)
    compile_tiny(model, tmp_path / "out", kernel_cache, **options).close()
    specs = specs_of(tmp_path / "out")
    assert {spec.op for spec in specs} == _OPS[name]
    texts = [cuda_text(spec) for spec in specs]
    assert all("as_float" in FULL and "blockIdx.x" in text for text in texts)
    check_code(texts)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_every_kernel_is_built() -> None:
    """Those of the models above, and all others that GPUs have."""
    import_tvm()
    from llmc.compiler.targets.gpu.kernels.registry import KERNELS
    from llmc.compiler.targets.reference.kernels.registry import KERNELS as PLAIN

    every = {*KERNELS, *PLAIN, *(op.name for op in OPS.values() if op.templates)}
    assert set().union(*_OPS.values(), {spec.op for spec in (*_OTHERS, *_ATTENTION.values())}) == every
    check_code([cuda_text(spec) for spec in _OTHERS])


def check_code(texts: Sequence[str]) -> list[bytes]:
    """What holds of all kernels. Gives their machine code for each architecture."""
    ptx = build_ptx("\n".join((FULL, *texts)), "compute_80")
    # No operation is left to the assembler's rounding or contraction.
    assert not re.search(rb"\t(add|mul|div|mad|sqrt)\.f(32|64)", ptx)
    # No sum depends on who comes first.
    assert not re.search(rb"\b(atom|red|multimem)\.", ptx)
    built = []
    for architecture in ARCHITECTURES:
        cubin, said = build_cubin(ptx, architecture)
        assert cubin.startswith(b"\x7fELF")
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
        assert len(spills) == 2 * len(texts)
        assert not any(spills)
        # What has no place in registers lies in a stack, too, where an array is indexed by a number of run time.
        assert not any(map(int, re.findall(r"(\d+) bytes stack frame", said)))
        built.append(cubin)
    return built


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_attention_of_wide_models_reads_128_bits_and_keeps_sums_in_registers(tmp_path: Path) -> None:
    built = check_code([cuda_text(spec) for spec in _ATTENTION.values()])
    if find_nvdisasm() is None:
        return
    for cubin in built:
        machine_code = listings(cubin, tmp_path)
        for name, spec in _ATTENTION.items():
            code = machine_code[spec.symbol()]
            counts = Counter(code)
            if name in ("decode", "rotated"):
                # Keys and values of a partition are all on their way before the first one is waited for.
                wide = Counter(code[: code.index("HMMA.16816.F32.BF16")])
                words = sum(
                    int(match[1]) * n for one, n in wide.items() if (match := re.match(r"LDG\.E\.(64|128)", one))
                )
                assert launch_of(spec, tensor_cores=True).items * words // 8 >= 2 * 128 * 128 * 2
            assert not [one for one in counts if one.startswith(("LDL", "STL"))], name
            if name == "merge":
                continue
            assert sum(n for one, n in counts.items() if one.startswith("LDG.E.128")) >= 2, name
            assert counts["HMMA.16816.F32.BF16"] >= 32, name
            assert sum(n for one, n in counts.items() if one.startswith("MOVM")) >= 4, name


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_states_are_read_side_by_side_and_stay_in_registers(tmp_path: Path) -> None:
    built = check_code([cuda_text(spec) for spec in _STATES.values()])
    if find_nvdisasm() is None:
        return
    for cubin in built:
        machine_code = listings(cubin, tmp_path)
        for name, spec in _STATES.items():
            counts = Counter(machine_code[spec.symbol()])
            assert not [one for one in counts if one.startswith(("LDL", "STL"))], name
            # Two of the tokens that a group prepares at a time, none of a token.
            assert sum(n for one, n in counts.items() if one.startswith("BAR.SYNC")) == 2, name
            reads, wide = ("LDG.E.64", "STG.E.64") if spec.op == "delta_rule" else ("LDG.E.128", "STG.E.128")
            # A state is written to its slot, and to another where it is kept.
            assert 2 * counts[reads] == counts[wide] > 0, name
            # Of the first tokens, and of those behind them, which are read while others are computed.
            assert counts["LDG.E.128.CONSTANT"] == 2 * counts["LDS.128"] == 2 * counts["STS.128"] > 0, name
            code = machine_code[spec.symbol()]
            last_wait = len(code) - code[::-1].index("BAR.SYNC.DEFER_BLOCKING")
            assert "LDG.E.128.CONSTANT" in code[last_wait : code.index("LDS.128")], name


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_what_nvcc_cannot_build_is_said() -> None:
    from llmc.compiler.targets.base import LinkError

    with pytest.raises(LinkError, match=r"nvcc failed with -ptx -arch=compute_80.*error"):
        build_ptx("no such word", "compute_80")
