"""Models whose layers norm in steps of one token, on the host: bits, tokens, and what tools say of such commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli.main import main
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.diff import diff_artifacts
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.tiny_models import make_tiny_model

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2,
}  # fmt: skip
_BUCKETS = "prefill=[1]x[32],decode=[1,3]x[64]"


@pytest.mark.parametrize(
    ("family", "quant", "target"),
    [
        ("llama", None, "cuda:sm_90a+dependent"),
        ("qwen2", QuantConfig("w4a16"), "cuda:sm_80"),
        pytest.param("llama", QuantConfig("w8a8"), "cuda:sm_80", marks=pytest.mark.slow),
    ],
    ids=["bf16", "w4a16 with biases", "w8a8"],
)
def test_a_token_has_the_same_bits_alone_and_in_company(
    family: str,
    quant: QuantConfig | None,
    target: str,
    tmp_path: Path,
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether its layers norm, or not. The tensors are those of the reference target, and the tools tell of them."""
    model = make_tiny_model(tmp_path / "model", family, **_SIZES)
    options: dict[str, Any] = {"buckets": _BUCKETS, "dtype": "bf16", **({} if quant is None else {"quant": quant})}
    with fake_nvcc(tmp_path):
        compile_tiny(model, tmp_path / "cuda", kernel_cache, target=target, **options).close()
    stub = Stub(stub_library(tmp_path))
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(tmp_path / "cuda", tmp_path)))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    tables = read_graphs(tmp_path / "cuda")
    prefill, one, three = range(3)
    ops = [[view.op for view in commands_of(tables, graph)] for graph in tables.graphs]
    normed = "normed_linear" if quant is None else "normed_linear_quant"
    assert ops[one].count(normed) >= 4
    assert not {normed, "normed_linear"} & {*ops[three], *ops[prefill]}
    with Artifact(tmp_path / "cuda") as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 30)
        found = []
        for graph in (one, three, prefill):
            with Replayer(artifact, num_blocks=8) as replayer:
                pages, rows = Pages(8, artifact.info.block_size), []
                replay(replayer, prefill, pages, [(0, tokens[:12], 0)])
                rows = [replay(replayer, graph, pages, [(0, [tokens[at]], at)]) for at in range(12, 20)]
            found.append(np.concatenate(rows))
    for other in found[1:]:
        assert np.array_equal(found[0].view(np.int32), other.view(np.int32))
    assert stub.report() == ""

    compile_tiny(model, tmp_path / "reference", kernel_cache, target="reference", **options).close()
    for step, alone in ((0, False), (2, True)):
        for a, b in (("reference", "cuda"), ("cuda", "reference")):
            compared = diff_artifacts(tmp_path / a, tmp_path / b, tokens[:12], step)
            # Int8 activations that lie between two numbers may round either way.
            assert compared.first(1e-1 if quant is not None and quant.scheme == "w8a8" else 3e-2) is None
            assert not compared.only_a + compared.only_b
            names = [tensor.name for tensor in compared.tensors]
            assert any("qkv" in name for name in names)
            assert any("norm" in name for name in names) is not alone
    views = {view.name: view for view in commands_of(tables, tables.graphs[one])}
    qkv = next(view for name, view in views.items() if "layers.1." in name and "qkv" in name)
    assert (qkv.op, qkv.family, qkv.layer) == (normed, "linear", 1)
    assert (qkv.buffers[0].dtype, qkv.buffers[0].shape) == ("f32", (1, _SIZES["hidden_size"]))
    assert qkv.buffers[-2].name.endswith("norm.weight")
    assert main(["inspect", str(tmp_path / "cuda"), "--json"]) == 0
    json.loads(capsys.readouterr().out)
