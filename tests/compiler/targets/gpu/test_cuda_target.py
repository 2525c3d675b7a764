"""The cuda target without a GPU: its kernels run on the host, behind a driver that checks every call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import CompileError
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.gpu import devices, nvcc
from llmc.compiler.targets.gpu.cuda import CudaTarget, names
from llmc.compiler.targets.gpu.wgmma import WAYS
from llmc.compiler.targets.registry import resolve_target, target_of
from llmc.cuda_code import CUBIN, PTX, Image, unpack
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, check_every_bucket, compile_tiny, random_tokens, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.gguf_models import SIZES, write_gguf
from support.opencl import needs_opencl
from support.parity import FAMILIES, LADDER, check_bits, reference_logits
from support.tensor_layers import float_spec
from support.tiny_models import make_tiny_model

_SMALL = "prefill=[1,2]x[32],decode=[1,3]x[64],mixed=[3]x[16]"


def compiled(model: Path, folder: Path, cache: Path, patch: pytest.MonkeyPatch, **options: object) -> Stub:
    """Compiles `model` for CUDA into `folder`/out; from now on devices of kind cuda run it on the host."""
    with fake_nvcc(folder):
        compile_tiny(model, folder / "out", cache, **{"target": "cuda:sm_80,sm_90", **options}).close()
    stub = Stub(stub_library(folder))
    patch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(folder / "out", folder)))
    patch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    return stub


def test_a_model_matches_transformers_and_itself(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, overrides = FAMILIES["llama-gqa3"]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    stub = compiled(model, tmp_path, kernel_cache, monkeypatch, buckets=_SMALL, dtype="f32")
    with Artifact(tmp_path / "out") as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens))
        check_bits(artifact)
        stub.launches()
        rows, found = [min(12, graph.max_tokens) for graph in artifact.graphs()], []
        # One graph a bucket, launches alone, and one of five graphs by the memory that they may take.
        for options, ways in (
            ({}, {"replayed"}),
            ({"eager": True}, {"launched"}),
            ({"graph_mib": 1}, {"replayed", "launched"}),
        ):
            device, pages = Replayer(artifact, num_blocks=8, **options), Pages(8, artifact.info.block_size)
            found.append([replay(device, g, pages, [(g, tokens[:n], 0)]) for g, n in enumerate(rows)])
            device.close()
            of_steps = [how for name, _, how in stub.launches() if not name.startswith("sample_")]
            assert set(of_steps) == ways
    assert np.array_equal(np.array(found[0]).view(np.int32), np.array(found[1]).view(np.int32))
    assert np.array_equal(np.array(found[0]).view(np.int32), np.array(found[2]).view(np.int32))
    assert stub.report() == ""


@pytest.mark.slow
def test_tensor_cores_give_every_bucket_and_chunk_the_same_bits(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dense layers, and of experts."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", **sizes, num_experts=5, num_experts_per_tok=4)
    stub = compiled(model, tmp_path, kernel_cache, monkeypatch, buckets=_SMALL, dtype="bf16")
    with Artifact(tmp_path / "out") as artifact:
        code = (tmp_path / "out" / "kernels.cuda").read_bytes()
        assert code.count(b"void __launch_bounds__(128, 1) linear_") > 3
        assert code.count(b"void __launch_bounds__(128, 1) expert_linear_") > 3
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens), 4e-2)
        check_bits(artifact)
    assert stub.report() == ""


@pytest.mark.slow
def test_a_gguf_file_runs_on_tensor_cores(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the types of Q4_K_M, whose q, k and v are joined in one format, against the values of its blocks."""
    fields: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}
    checkpoint, path, values = (tmp_path / name for name in ("checkpoint", "model.gguf", "values"))
    make_tiny_model(checkpoint, "llama", **fields)
    write_gguf(
        checkpoint, path, lambda name: "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K", dequantized=values
    )
    stub = compiled(path, tmp_path, kernel_cache, monkeypatch, buckets=_SMALL, dtype="f16")
    with Artifact(tmp_path / "out") as artifact:
        code = (tmp_path / "out" / "kernels.cuda").read_bytes()
        assert code.count(b"void __launch_bounds__(128, 1) linear_quant_") == code.count(b") linear_quant_") > 3
        assert code.count(b"void __launch_bounds__(128, 1) normed_linear_quant_") > 1
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(values, tokens), 1e-2)
        check_bits(artifact)
    assert stub.report() == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_wgmma_gives_every_bucket_and_chunk_the_same_bits(
    way: str, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dense layers, and of experts; prompts have more rows than 64, and so has an expert more than 16."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", **sizes, num_experts=5, num_experts_per_tok=4)
    buckets = "prefill=[1,2]x[96],decode=[1,3]x[128],mixed=[3]x[16]"
    options = {"target": f"cuda:sm_90a+{way}", "buckets": buckets, "dtype": "bf16"}
    stub = compiled(model, tmp_path, kernel_cache, monkeypatch, **options)
    with Artifact(tmp_path / "out") as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 112)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens), 4e-2)
        check_bits(artifact)
    assert stub.report() == ""


@needs_opencl
def test_the_bits_are_those_of_opencl(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One source of kernels: what PoCL computes of it the host does, too, where tensor cores have no part in it."""
    model = make_tiny_model(tmp_path / "model", "qwen3")
    options = {"buckets": "prefill=[1]x[32],decode=[1]x[64]", "dtype": "f32"}
    compiled(model, tmp_path, kernel_cache, monkeypatch, **options)
    compile_tiny(model, tmp_path / "opencl", kernel_cache, target="opencl", **options).close()
    found = []
    for folder in ("out", "opencl"):
        with Artifact(tmp_path / folder) as artifact:
            tokens = random_tokens(artifact.info.vocab_size, 20)
            device, pages = Replayer(artifact, num_blocks=8), Pages(8, artifact.info.block_size)
            found.append(
                [replay(device, 0, pages, [(0, tokens[:19], 0)]), replay(device, 1, pages, [(0, tokens[19:], 19)])]
            )
            device.close()
    assert np.array_equal(np.array(found[0]).view(np.int32), np.array(found[1]).view(np.int32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_matches_transformers(
    name: str, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, overrides = FAMILIES[name]
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    stub = compiled(model, tmp_path, kernel_cache, monkeypatch, buckets=LADDER, dtype="f32")
    with Artifact(tmp_path / "out") as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 48)
        check_every_bucket(artifact, tokens, reference_logits(model, tokens), 1e-4)
        check_bits(artifact)
    assert stub.report() == ""


def test_an_artifact_has_code_of_each_architecture_and_ptx(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    with fake_nvcc(tmp_path):
        for name in ("a", "b"):
            compile_tiny(
                model,
                tmp_path / name,
                kernel_cache,
                buckets="prefill=[1]x[16],decode=[1]x[32]",
                target="cuda:sm_90a,sm_80",
            ).close()
    tables, code = read_graphs(tmp_path / "a"), (tmp_path / "a" / "kernels.cuda").read_bytes()
    assert (tables.target.kind, tables.target.name, tables.target.level) == ("cuda", "cuda:sm_80,sm_90a", 1)
    assert code == (tmp_path / "b" / "kernels.cuda").read_bytes()
    images = unpack(code)
    wanted = [(CUBIN, 80, False), (CUBIN, 90, True), (PTX, 80, False)]
    assert [(i.kernel, i.kind, i.capability, i.exact) for i in images] == [
        (kernel, *one) for kernel in range(len(tables.kernels)) for one in wanted
    ]
    for image in images:
        assert tables.kernels[image.kernel].symbol.encode() in image.code
        assert image.kind != PTX or image.code.endswith(b"\0")


@pytest.mark.parametrize(
    ("name", "of_layer", "of_other"),
    [
        ("cuda:sm_80,sm_90a+wgmma-many", [80], [80]),
        ("cuda:sm_90a,sm_100+wgmma", [100], [90]),
        ("cuda:sm_90a+wgmma", [], [90]),
    ],
)
def test_wgmma_is_in_code_of_its_architecture_alone(
    name: str, of_layer: list[int], of_other: list[int], tmp_path: Path
) -> None:
    """Later GPUs have PTX of the first architecture without it, if there is one."""
    layer, other = float_spec("bf16", 64, 64), float_spec("f32", 64, 64)
    for spec, expected in ((layer, of_layer), (other, of_other)):
        with fake_nvcc(tmp_path):
            images = unpack(resolve_target(name).compile(spec, None))
        for image in images:
            exact = (image.capability, image.exact) == (90, True)
            assert (b"llmc_wgmma_bf16<" in image.code) == (exact and spec is layer)
        assert [(i.capability, i.exact) for i in images if i.kind == PTX] == [(of, False) for of in expected]


def test_which_gpus_run_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "cuda:sm_90a": (90, 100, 103, 120, 121),
        "cuda:sm_90a,sm_100+wgmma": (90, 100, 103, 120, 121),
        "cuda:sm_90a,sm_120+wgmma": (90, 120, 121),
        "cuda:sm_90a,sm_100a+wgmma+dependent": (90, 100, 103, 120, 121),
        "cuda:sm_90a+wgmma": (90,),
        "cuda:sm_80,sm_90a+wgmma-many": (80, 87, 89, 90, 100, 103, 120, 121),
    }
    for capability in (75, 80, 87, 89, 90, 100, 103, 120, 121):
        monkeypatch.setattr(devices, "cuda_capabilities", lambda found=capability: [found])
        assert [name for name in runs if resolve_target(name).runs_here()] == [
            name for name, on in runs.items() if capability in on
        ]


def test_which_gpus_run_an_image() -> None:
    """A cubin is for its major; that of Tegra, and that of an architecture with a suffix, for itself alone."""

    def runs(kind: int, capability: int, *, exact: bool = False) -> list[int]:
        image = Image(0, kind, capability, exact, b"")
        return [device for device in (80, 86, 87, 89, 90, 100, 101, 103) if image.runs_on(device)]

    assert runs(CUBIN, 80) == [80, 86, 89]
    assert runs(CUBIN, 87) == [87]
    assert runs(CUBIN, 100) == [100, 103]
    assert runs(CUBIN, 90, exact=True) == runs(CUBIN, 90) == [90]
    assert runs(CUBIN, 100, exact=True) == [100]
    assert runs(PTX, 87) == [87, 89, 90, 100, 101, 103]
    assert runs(PTX, 90, exact=True) == [90]


def test_names() -> None:
    assert "cuda:sm_90" in names()
    both = resolve_target("cuda:sm_90,sm_80")
    assert both == CudaTarget(("sm_80", "sm_90"))
    assert target_of(json.loads(json.dumps(both.record()))) == both
    wide = resolve_target("cuda:sm_90a,sm_80+wgmma-many")
    assert (wide.name, target_of(wide.record())) == ("cuda:sm_80,sm_90a+wgmma-many", wide)
    for name, said in (
        ("cuda:sm_90a+tma", r"there is no option 'tma' of CUDA; known are dependent, wgmma, wgmma-many"),
        ("cuda:sm_90+wgmma", r"wgmma is for sm_90a alone; name sm_90a, or leave \+wgmma out"),
        ("cuda:sm_90a+wgmma+wgmma-many", r"wgmma and wgmma-many exclude each other; leave one out"),
    ):
        with pytest.raises(TargetError, match=said):
            resolve_target(name)
    with pytest.raises(TargetError, match=r"there is no CUDA architecture 'sm_12'; known are sm_80, .*sm_120a, and"):
        resolve_target("cuda:sm_12,sm_90")
    with pytest.raises(TargetError, match=r"unknown target 'cuda'; known targets: native, .*cuda:sm_80"):
        resolve_target("cuda")


def test_compiling_needs_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    nvcc.nvcc_version.cache_clear()
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    with pytest.raises(CompileError, match=r"needs nvcc, .* install a CUDA toolkit, or the package nvidia-cuda-nvcc"):
        compile_tiny(model, tmp_path / "out", tmp_path / "cache", target="cuda:sm_80")
    assert not (tmp_path / "out").exists()
