"""Norms that linear layers compute themselves: in which graphs, and what stays two kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets import Bucket
from llmc.compiler.config import CompileConfig
from llmc.compiler.graph.commands import CommandList
from llmc.compiler.graph.demands import weight_requests
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.resolve import resolve
from llmc.compiler.store.cache import GraphCache
from llmc.quantize import QuantConfig

from support.tiny_models import make_tiny_model

_LAYERS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_ONE, _FOUR, _PROMPT = Bucket("decode", 1, 64), Bucket("decode", 4, 64), Bucket("prefill", 1, 32)
_NORMED = ("normed_linear", "normed_linear_quant")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("norms") / "model", "llama", **_SIZES)


def _graphs(model: Path, cache: Path, target: str = "cuda:sm_80", **more: Any) -> dict[Bucket, CommandList]:
    """The command list of each bucket."""
    options: dict[str, Any] = {"dtype": "bf16", "buckets": "prefill=[1]x[32],decode=[1,4]x[64]", **more}
    resolved = resolve(CompileConfig(model=model, output=cache / "out", target=target, cache_dir=cache, **options))
    kept = GraphCache(cache)
    components, params = resolved.graph_components(), resolved.graph_params()
    tracer = Tracer(resolved, kept)
    made = plan_graphs(tuple(resolved.ladder), params, components, kept, tracer.bind, lambda done, count: None)
    for commands in (commands for _, commands in made.values()):
        shapes = resolved.weight_shapes()
        requests = weight_requests(shapes, [commands], "bf16", resolved.recipe)
        assert {one.parts for one in requests if "norm" in one.name} == {1}
        packed = {one.name for one in requests if one.packed}
        assert not any("norm" in name for name in packed)
        assert any("qkv" in name for name in packed)
    return {bucket: commands for bucket, (_, commands) in made.items()}


def _ops(commands: CommandList) -> Counter[str]:
    return Counter(command.spec.op for command in commands.commands)


def test_layers_of_one_token_norm(llama: Path, kernel_cache: Path) -> None:
    """The output projection, too, where it is small. Their last input is the norm's weight, and their first one what
    the norm reads."""
    graphs = _graphs(llama, kernel_cache)
    one, four = _ops(graphs[_ONE]), _ops(graphs[_FOUR])
    assert one["normed_linear"] == 2 * _LAYERS + 1
    assert one["rms_norm"] == 0
    for bucket in (_FOUR, _PROMPT):
        assert _ops(graphs[bucket])["rms_norm"] == 2 * _LAYERS + 1
        assert not any(_ops(graphs[bucket])[op] for op in _NORMED)
    # A layer has one kernel less for another reason, too: attention rotates.
    assert one["rotated_attention"] == four["paged_attention"] == _LAYERS
    assert one.total() == four.total() - (2 * _LAYERS + 1) - _LAYERS
    within = ("rms_norm", "rope_kv_write")
    split = zip(graphs[_ONE].commands, (c for c in graphs[_FOUR].commands if c.spec.op not in within), strict=True)
    norms = iter([command for command in graphs[_FOUR].commands if command.spec.op == "rms_norm"])
    for joined, plain in split:
        if joined.spec.op not in _NORMED:
            assert joined.spec == plain.spec or joined.spec.op == "rotated_attention"
            continue
        norm = next(norms)
        assert joined.operands[-2] == norm.operands[1]
        assert joined.operands[1] == plain.operands[1]
        own = {"eps": norm.spec.as_dict()["eps"], **plain.spec.as_dict()}
        assert joined.spec.as_dict() == own
    assert next(norms, None) is None


def test_a_joined_layer_reads_what_the_norm_read(llama: Path, kernel_cache: Path) -> None:
    """No place of the arena is written between the command that makes a row and the layer that norms it."""
    commands = _graphs(llama, kernel_cache)[_ONE].commands
    for index, command in enumerate(commands):
        if command.spec.op not in _NORMED:
            continue
        x = command.operands[0]
        assert x.nbytes == 4 * _SIZES["hidden_size"]
        made = max(i for i in range(index) if commands[i].operands[-1].offset == x.offset)
        assert commands[made].spec.op in ("embedding", "linear", "gather_rows")
        assert commands[made].operands[-1] == x


@pytest.mark.parametrize(
    ("target", "options", "normed", "norms"),
    [
        ("cuda:sm_90a+dependent", {}, 7, 0),
        ("cuda:sm_90a+wgmma-many", {}, 7, 0),
        ("cuda:sm_90a+wgmma", {}, 0, 7),  # few rows have products of another instruction
        ("opencl", {}, 0, 7),
        ("reference", {}, 0, 7),
        ("cuda:sm_80", {"dtype": "f32"}, 0, 7),
        ("cuda:sm_80", {"quant": QuantConfig("w4a16")}, 7, 0),
        ("cuda:sm_80", {"quant": QuantConfig("w8a8")}, 7, 0),
        ("cuda:sm_80", {"lora_slots": 2}, 0, 7),  # adapters read normed rows, too
        ("cuda:sm_80", {"tensor_parallel": 2}, 7, 0),
        ("cuda:sm_80", {"pipeline_parallel": 2}, 7, 0),
    ],
    ids=str,
)
def test_which_targets_and_models(
    target: str, options: dict[str, Any], normed: int, norms: int, llama: Path, kernel_cache: Path
) -> None:
    found = _ops(_graphs(llama, kernel_cache, target, **options)[_ONE])
    assert (sum(found[op] for op in _NORMED), found["rms_norm"]) == (normed, norms)


def test_what_follows_a_layer_stays(llama: Path, kernel_cache: Path) -> None:
    """A gated layer's rows become int8 in scratch memory, whoever norms its input."""
    graphs = _graphs(llama, kernel_cache, quant=QuantConfig("w8a8"))
    for bucket in (_ONE, _FOUR):
        commands = graphs[bucket].commands
        gated = [index for index, command in enumerate(commands) if command.spec.as_dict().get("gated")]
        assert len(gated) == _LAYERS
        for index in gated:
            assert commands[index + 1].spec.op == "quantize_rows"
            scratch = commands[index].operands[-1]
            assert scratch == commands[index + 1].operands[0]
            assert scratch.nbytes == bucket.batch * 2 * _SIZES["intermediate_size"]
            assert scratch.offset + scratch.nbytes <= graphs[bucket].arena_bytes


def test_a_norm_that_two_read_stays(kernel_cache: Path, tmp_path: Path) -> None:
    """As that of a router and of experts."""
    sizes = {**_SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", **sizes)
    found = _ops(_graphs(model, kernel_cache)[_ONE])
    assert (found["normed_linear"], found["rms_norm"]) == (_LAYERS + 1, _LAYERS)
