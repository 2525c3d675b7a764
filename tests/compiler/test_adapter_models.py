"""Models with room for LoRA adapters: what each adapter makes of them, beside others, against the merged weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.adapters import AdapterHeads, AdapterLimits, adapter_linears, limits_of, record
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.ops.adapters import is_too_large
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.targets.registry import resolve_target
from llmc.manifest import read_manifest
from llmc.models import get_family, load_config
from llmc.quantize import QuantConfig
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.graphs_file import read_graphs

from support.adapters import logprobs_of, make_adapter, merged_checkpoint, merged_model, products_of
from support.compiled import assert_same_bytes, compile_tiny, random_tokens
from support.engine_driver import MIXED_LADDER
from support.expert_adapters import BEFORE_SWAP, add_experts
from support.families import CASES
from support.gemma_families import GEMMA4_LARGE
from support.inspected import inspected, inspected_text
from support.marks import rare
from support.mxfp4_experts import make_mxfp4_model
from support.opencl import needs_opencl
from support.sixteen_bits import clear_length, clear_text
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA: dict[str, Any] = {"lora_slots": 4, "lora_rank": 20, "buckets": MIXED_LADDER, "block_size": 16}

FEW = "prefill=1x8,mixed=4x8,decode=4x64"


def prompt_logprobs(
    engine: Engine, prompts: list[tuple[list[int], int]]
) -> tuple[list[list[float]], list[tuple[list[int], list[float]]]]:
    """Of prompts with the number of an adapter, submitted together: logprobs of the prompt's tokens, and the tokens
    that follow greedily with theirs."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, num_logprobs=0)
    ids = [engine.submit(p, params, num_prompt_logprobs=0, adapter=adapter) for p, adapter in prompts]
    scores: dict[int, list[float]] = {i: [] for i in ids}
    outputs: dict[int, tuple[list[int], list[float]]] = {i: ([], []) for i in ids}
    while engine.step() or engine.stats.num_running:
        engine.check_integrity()
        for event in engine.poll():
            assert event.kind != "failed", event.error_message
            if event.kind == "prompt_logprobs":
                scores[event.request_id].append(event.logprob)
            elif event.kind == "token":
                outputs[event.request_id][0].append(event.token_id)
                outputs[event.request_id][1].append(event.logprob)
    return [scores[i] for i in ids], [outputs[i] for i in ids]


def check_against_merged(
    model: Path, artifact: Path, adapters: list[Path | None], bound: float, dtype: str | None = None
) -> None:
    """Every adapter in one batch, beside the model alone; each has the bits there that it has by itself.

    dtype: of 16 bits, where a text is compared for as long as its experts are clear in it.
    """
    merged = [model] * len(adapters)
    if dtype is not None:
        merged = [
            model if path is None else merged_checkpoint(artifact.parent / f"merged-{i}", model, products_of(path))
            for i, path in enumerate(adapters)
        ]
        prompts = [clear_text(path, dtype, 9 + 3 * i, seed=i) for i, path in enumerate(merged)]
    else:
        prompts = [random_tokens(515, 9 + 3 * i, seed=i) for i in range(len(adapters))]
    with Artifact(artifact) as opened, Engine(opened, num_threads=2) as engine:
        loaded = Adapters(artifact, opened, engine)
        ids = [0 if path is None else loaded.load(path.name, path).id for path in adapters]
        requests = list(zip(prompts, ids, strict=True))
        scores, outputs = prompt_logprobs(engine, requests)
        alone = [prompt_logprobs(engine, [request]) for request in requests]
    assert [([score], [output]) for score, output in zip(scores, outputs, strict=True)] == alone
    for i, (prompt, adapter, (tokens, logprobs)) in enumerate(zip(prompts, adapters, outputs, strict=True)):
        text = prompt + tokens
        expected = logprobs_of(merged_model(model, adapter), text)
        num_clear = len(text) if dtype is None else clear_length(merged[i], dtype, text)
        assert num_clear >= len(prompt)
        # A token's log-probability is of the row before it.
        found = [*scores[i], *logprobs][:num_clear]
        wanted = [expected[row, token] for row, token in enumerate(text[1:])][:num_clear]
        np.testing.assert_allclose(found, wanted, atol=bound, rtol=0, err_msg=str(adapter))


@pytest.mark.parametrize(
    "target", ["native", "reference", pytest.param("opencl", marks=[needs_opencl, pytest.mark.slow])]
)
def test_adapters_side_by_side_are_the_merged_models(target: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Ranks from 3 to 256, whole panels and not, in one batch; every linear layer, of logits, too."""
    model = make_tiny_model(tmp_path / "model", "llama")
    options = {**LORA, "lora_slots": 5, "lora_rank": 256}
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", target=target, **options).close()
    adapters: list[Path | None] = [
        make_adapter(tmp_path / "q", model, ("q_proj",), rank=3, seed=1),
        make_adapter(tmp_path / "all", model, (*ALL, "lm_head", "embed_tokens"), rank=256, seed=2),
        None,
        make_adapter(tmp_path / "mixed", model, ("v_proj", "down_proj"), rank=24, ranks={"down_proj": 100}, seed=3),
        make_adapter(tmp_path / "gate", model, ("up_proj",), rank=128, seed=4, size=0.1, use_rslora=True),
        make_adapter(tmp_path / "ends", model, ("lm_head", "embed_tokens"), rank=64, seed=5),
    ]
    check_against_merged(model, tmp_path / "a", adapters, 2e-4)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gptj", {"rotary_dim": 8}),
        rare("gpt2", {}),
        pytest.param("gpt_neox", {"rotary_pct": 0.5}, marks=pytest.mark.slow),
        rare("phi3", {}),
        rare("qwen3_next", {"layer_types": ["full_attention"], "num_experts": 0, "head_dim": 24}),
        rare("lfm2", {"layer_types": ["conv", "full_attention"]}),
        rare("gemma4_text", {**GEMMA4_LARGE, "layer_types": ["full_attention"]}),
        rare("falcon_h1", CASES["falcon_h1-biases"][1]),
        rare("granitemoehybrid", CASES["granitemoehybrid"][1]),
        rare("nemotron_h", CASES["nemotron_h-biases"][1]),
    ],
)
def test_families(family: str, fields: dict[str, Any], tmp_path: Path, kernel_cache: Path) -> None:
    """Fused and turned weights, rows in another order, gates that are no silu, fused gates, a gate among q's rows."""
    layers = {"num_hidden_layers": len(fields.get("layer_types", (1,)))}
    model = make_tiny_model(tmp_path / "model", family, **{**fields, **layers})
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", **LORA).close()
    found = make_adapter(tmp_path / "all", model, ("",), rank=5, seed=2)
    check_against_merged(model, tmp_path / "a", [found, None], 5e-4)


@pytest.mark.slow
def test_half_precision(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f16", **LORA).close()
    adapters: list[Path | None] = [make_adapter(tmp_path / "all", model, ALL, rank=9, seed=2, size=0.5), None]
    check_against_merged(model, tmp_path / "a", adapters, 0.05)


@pytest.mark.parametrize(
    ("case", "scheme", "more"),
    [
        ("llama", "w8a8", {}),
        pytest.param("llama", "w4a16", {}, marks=pytest.mark.slow),
        rare("mixtral", "w8a8", {"lora_experts": True}),
        rare("deepseek_v3", "w8a8", {}),
    ],
)
def test_quantized_models(case: str, scheme: str, more: dict[str, Any], tmp_path: Path, kernel_cache: Path) -> None:
    """The adapter is as much of the model as without: its products are of floats, whatever the weights are."""
    family, fields = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **{**fields, "num_hidden_layers": 1})
    options = {**LORA, **more, "quant": QuantConfig(scheme)}
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", **options).close()
    compile_tiny(model, tmp_path / "b", kernel_cache, dtype="f32", quant=QuantConfig(scheme), buckets=MIXED_LADDER,
                 block_size=16).close()  # fmt: skip
    adapter = make_adapter(tmp_path / "all", model, (*ALL, "kv_b_proj", "w1", "w2", "w3"), rank=9, seed=2, size=4.0)
    prompt = random_tokens(515, 12)
    with Artifact(tmp_path / "a") as opened, Engine(opened) as engine:
        number = Adapters(tmp_path / "a", opened, engine).load("all", adapter).id
        (with_it, without), _ = prompt_logprobs(engine, [(prompt, number), (prompt, 0)])
    with Artifact(tmp_path / "b") as opened, Engine(opened) as engine:
        (plain,), _ = prompt_logprobs(engine, [(prompt, 0)])
    assert without == plain
    expected, base = (logprobs_of(merged_model(model, of), prompt) for of in (adapter, None))
    wanted, unchanged = ([of[i, t] for i, t in enumerate(prompt[1:])] for of in (expected, base))
    change = np.subtract(wanted, unchanged)
    np.testing.assert_allclose(np.subtract(with_it, plain), change, atol=0.35 * np.abs(change).max(), rtol=0)


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("llama", {}),
        rare("mixtral", {"lora_experts": True}),
        rare("gpt_oss", {"lora_experts": True}),
        rare("deepseek_v2-lite", {}),
    ],
)
def test_rows_without_an_adapter_have_the_models_bits(
    case: str, more: dict[str, Any], tmp_path: Path, kernel_cache: Path
) -> None:
    """Those of the artifact that takes none."""
    family, fields = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **{**fields, "num_hidden_layers": 1})
    prompts = [random_tokens(515, n, seed=n) for n in (1, 7, 8, 30)]
    compile_tiny(model, tmp_path / "with", kernel_cache, dtype="bf16", **{**LORA, "lora_rank": 128, **more}).close()
    compile_tiny(model, tmp_path / "without", kernel_cache, dtype="bf16", buckets=MIXED_LADDER, block_size=16).close()
    modules = (*ALL, "w1", "w2", "w3", "kv_b_proj", "lm_head", "embed_tokens")
    adapter = make_adapter(tmp_path / "all", model, modules, rank=128, seed=2, size=0.5)
    other = make_adapter(tmp_path / "other", model, ("up_proj", "w3", "lm_head"), rank=8, seed=3, size=0.5)
    with Artifact(tmp_path / "without") as opened, Engine(opened) as engine:
        expected = prompt_logprobs(engine, [(prompt, 0) for prompt in prompts])
    with Artifact(tmp_path / "with") as opened, Engine(opened) as engine:
        assert prompt_logprobs(engine, [(prompt, 0) for prompt in prompts]) == expected
        loaded = Adapters(tmp_path / "with", opened, engine)
        numbers = [loaded.load(path.name, path).id for path in (adapter, other)]
        scores, outputs = prompt_logprobs(engine, [(p, n) for p in prompts for n in (numbers[0], 0, numbers[1])])
    assert (scores[1::3], outputs[1::3]) == expected
    assert scores[0::3] != scores[1::3] != scores[2::3]
    check_against_merged(model, tmp_path / "with", [adapter, None, other], 0.25, "bf16")


@pytest.mark.parametrize("scheme", [None, rare("w8a8")])
def test_an_output_projection_that_is_the_embedding(scheme: str | None, tmp_path: Path, kernel_cache: Path) -> None:
    """Its adapter changes logits, and leaves the embedding alone; one of the embedding changes no more than that."""
    model = make_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    quant = None if scheme is None else QuantConfig(scheme)
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", quant=quant, **LORA).close()
    adapters: list[Path | None] = [
        make_adapter(tmp_path / f"{seed}", model, modules, rank=9, seed=seed)
        for seed, modules in enumerate((("lm_head",), ("lm_head", "q_proj"), ("embed_tokens",)))
    ]
    check_against_merged(model, tmp_path / "a", [*adapters, None], 2e-4 if scheme is None else 0.2)


@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("native", "mixtral"),
        ("reference", "qwen3_moe"),
        pytest.param("opencl", "mixtral", marks=[needs_opencl, pytest.mark.exhaustive]),
    ],
)
def test_experts(target: str, case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Experts with adapters of any rank and scale, some without one, beside all other layers."""
    family, fields = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **{**fields, "num_hidden_layers": 1})
    gate, up, down = ("w1", "w3", "w2") if case == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    some = f"1.{down}", f"2.{down}", f"3.{up}"
    shrunk = {"size": 0.5, "use_rslora": True}  # so that scales differ, too
    options = {**LORA, "buckets": FEW, "lora_experts": True, "target": target}
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", **options).close()
    adapters: list[Path | None] = [
        # Without an effect on its gates.
        make_adapter(tmp_path / "all", model, ("q_proj", gate, up, down), rank=20, seed=2, alpha_pattern={gate: 0}),
        None,
        make_adapter(tmp_path / "some", model, some, rank=3, ranks={f"2.{down}": 7}, seed=3, **shrunk),
        make_adapter(tmp_path / "head", model, ("o_proj", "lm_head"), rank=16, seed=4),
    ]
    check_against_merged(model, tmp_path / "a", adapters, 2e-4)


@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("native", "gpt_oss"),
        ("native", "mixtral"),
        rare("reference", "gpt_oss"),
        rare("native", "granitemoe"),
        rare("native", "llama4_text"),
        rare("native", "qwen3_5_moe"),
        rare("native", "gemma4_text-experts"),
        rare("reference", "gemma4_text-experts"),
        pytest.param("opencl", "gpt_oss", marks=[needs_opencl, pytest.mark.exhaustive]),
    ],
)
def test_experts_of_one_tensor(target: str, case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Adapters of the tensor, whether the checkpoint has it or linear layers; gates with a limit or GELU; gate and up
    in pairs."""
    family, fields = CASES[case]
    layers = {} if case in ("llama4_text", "qwen3_5_moe", "gemma4_text-experts") else {"num_hidden_layers": 1}
    model = make_tiny_model(tmp_path / "model", family, **{**fields, **layers})
    options = {**LORA, "buckets": FEW, "lora_experts": True, "target": target}
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", **options).close()
    both = ("experts.gate_up_proj", "experts.down_proj")
    plain = {name: make_adapter(tmp_path / name, model, ("o_proj",), rank=4) for name in ("both", "old", "down")}
    adapters: list[Path | None] = [
        add_experts(plain["both"], model, both, seed=2, size=0.5, rank_pattern={"down_proj": 20}),
        None,
        add_experts(
            plain["old"], model, both, seed=3, size=0.5, version=BEFORE_SWAP, alpha_pattern={"gate_up_proj": 9}
        ),
        add_experts(plain["down"], model, both[1:], seed=4),
    ]
    check_against_merged(model, tmp_path / "a", adapters, 2e-4)


@pytest.mark.parametrize("target", [rare("native"), rare("reference")])
def test_experts_without_a_gate(target: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Beside layers of other blocks, with linear layers to and from latent vectors."""
    model = make_tiny_model(tmp_path / "model", "nemotron_h", **CASES["nemotron_h-latent"][1])
    options = {**LORA, "buckets": FEW, "lora_experts": True, "target": target}
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", **options).close()
    adapters: list[Path | None] = [make_adapter(tmp_path / "all", model, ("",), rank=5, seed=2, size=0.5), None]
    check_against_merged(model, tmp_path / "a", adapters, 5e-4)


@pytest.mark.exhaustive
def test_experts_in_mxfp4(tmp_path: Path, kernel_cache: Path) -> None:
    """As gpt-oss is published and trained: matrices of experts in four bits, adapters of both tensors."""
    floats, stored = make_mxfp4_model(tmp_path)
    options = {**LORA, "buckets": FEW, "lora_experts": True}
    compile_tiny(stored, tmp_path / "a", kernel_cache, dtype="f32", **options).close()
    both = ("experts.gate_up_proj", "experts.down_proj")
    adapters: list[Path | None] = [
        add_experts(make_adapter(tmp_path / "x", floats, ("q_proj", "o_proj")), floats, both, size=0.5),
        None,
    ]
    check_against_merged(floats, tmp_path / "a", adapters, 2e-4)


LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("native", "deepseek_v3"),
        ("native", "deepseek_v2-lite"),
        ("reference", "deepseek_v2"),
        rare("native", "minicpm3"),
        pytest.param("opencl", "deepseek_v3", marks=[needs_opencl, pytest.mark.exhaustive]),
    ],
)
def test_latent_attention(target: str, case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Every linear layer of it, and what makes keys and values of all heads, which is computed by head."""
    family, fields = CASES[case]
    model = make_tiny_model(tmp_path / "model", family, **{**fields, "num_hidden_layers": 1})
    compile_tiny(model, tmp_path / "a", kernel_cache, dtype="f32", target=target, **{**LORA, "buckets": FEW}).close()
    adapters: list[Path | None] = [
        make_adapter(tmp_path / "heads", model, ("kv_b_proj",), rank=5, seed=1, use_rslora=True, size=0.5),
        None,
        make_adapter(tmp_path / "all", model, (*LATENT, *ALL), rank=20, seed=2),
        make_adapter(tmp_path / "others", model, LATENT[:4], rank=17, seed=3),
    ]
    check_against_merged(model, tmp_path / "a", adapters, 2e-4)


def test_what_is_split_by_head(tmp_path: Path) -> None:
    """Two weights of one module; together they have all its rows."""
    model = make_tiny_model(tmp_path / "model", "deepseek_v3", **{**CASES["deepseek_v3"][1], "num_hidden_layers": 1})
    limits = AdapterLimits(2, 8)
    linears = adapter_linears(load_config(model), limits).values()
    key, value = (linear for linear in linears if linear.heads)
    assert [part.module for part in (*key.parts, *value.parts)] == ["model.layers.0.self_attn.kv_b_proj"] * 2
    assert (key.weight, key.columns, key.rows) == ("layers.0.attention.key_up.weight", 12, (20,))
    assert (value.weight, value.columns, value.rows) == ("layers.0.attention.value_up.weight", 20, (10,))
    assert (key.heads, value.heads) == (AdapterHeads(3, 22, 0, "a"), AdapterHeads(3, 22, 12, "b"))
    large = AdapterLimits(256, 512)
    for linear in (key, value):
        assert linear.heads is not None
        many = replace(linear, heads=replace(linear.heads, count=1 << 10))
        assert [is_too_large(one, large, resolve_target("reference"), "f32") for one in (linear, many)] == [False, True]


def test_an_artifact_says_what_it_takes(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    options = {**LORA, "dtype": "f32"}
    compile_tiny(model, tmp_path / "a", kernel_cache, **options).close()
    tables, manifest = read_graphs(tmp_path / "a"), read_manifest(tmp_path / "a")
    assert tables.header.version == manifest["format_version"] == 6
    assert [tables.weights[adapter.weight].name for adapter in tables.adapters] == [
        "embed.weight", "layers.0.attention.qkv.weight", "layers.0.attention.out.weight", "layers.0.mlp.gate_up.weight",
        "layers.0.mlp.down.weight", "lm_head.weight",
    ]  # fmt: skip
    assert [adapter.slot.rows for adapter in tables.adapters] == [
        (60,), (60, 20, 20), (60,), (100, 100), (60,), (515,),
    ]  # fmt: skip
    # A linear reads nothing that the command before it writes, so threads do not meet between them.
    ops = [tables.kernels[command.kernel].symbol.rpartition("_")[0] for command in tables.commands]
    barriers = [command.barrier for command in tables.commands]
    assert {op for op, barrier in zip(ops, barriers, strict=True) if not barrier} == {"adapter_shrink", "adapter_pick"}
    assert [ops[i + 1 : i + 3] for i, barrier in enumerate(barriers) if not barrier] == (
        [["embedding", "adapter_expand"], *[["linear", "adapter_expand"]] * 5] * len(tables.graphs)
    )
    found = inspected(tmp_path / "a")["adapters"]
    assert found is not None
    assert (found["slots"], found["rank"], found["layers"], found["commands"]) == (4, 20, 6, 13)
    assert "LoRA adapters: 4 at once of rank 20 or less" in inspected_text(tmp_path / "a")
    # The same inputs make the same bytes.
    compile_tiny(model, tmp_path / "b", kernel_cache, **options).close()
    assert_same_bytes(tmp_path / "a", tmp_path / "b")


def test_parts_that_are_not_in_an_artifact_are_recorded(tmp_path: Path) -> None:
    """In the names of all layouts: an adapter may have others than the checkpoint."""
    config = load_config(make_tiny_model(tmp_path / "model", "gemma3", num_hidden_layers=1))
    limits = AdapterLimits(1, 4)
    unread = get_family("gemma3").unread_modules(config)
    found = record(limits, adapter_linears(config, limits).values(), unread=unread)["unread"]
    assert {"vision_tower.", "model.vision_tower.", "multi_modal_projector."} <= set(found)
    llama = load_config(make_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=1))
    assert "unread" not in record(limits, [], unread=get_family("llama").unread_modules(llama))


def test_a_model_of_vectors_takes_none(embedder: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="--lora-slots is for models that write text"):
        compile_model(CompileConfig(embedder[0], tmp_path / "a", lora_slots=2, buckets="prefill=1x32"))


def test_vocabularies_too_large_for_slots(tmp_path: Path, kernel_cache: Path) -> None:
    """The embedding and the output projection are left out, and it is said; other layers have their slots."""
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, vocab_size=1 << 15)
    options: dict[str, Any] = {
        "lora_slots": 256,
        "lora_rank": 256,
        "buckets": "prefill=1x8,decode=1x64",
        "block_size": 16,
    }
    config = CompileConfig(
        model, tmp_path / "a", dtype="f32", target="reference", cache_dir=kernel_cache, jobs=1, **options
    )
    (warning,) = (one for one in compile_model(config).warnings if "adapters" in one)
    assert warning.startswith("lm_head and model.embed_tokens: no adapters by name, for 256 of rank 256 are more than")
    lora = read_manifest(tmp_path / "a")["lora"]
    weights = {kind: [linear["weight"] for linear in lora[kind]] for kind in ("linears", "left_out")}
    assert weights["left_out"] == ["lm_head.weight", "embed.weight"]
    assert [weight.rpartition(".0.")[2] for weight in weights["linears"]] == [
        "attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight",
    ]  # fmt: skip
    # One slot less is enough to have them.
    assert resolve(replace(config, lora_slots=255)).left_out() == ()


def test_other_layers_too_large_for_slots(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "mixtral", num_local_experts=90, num_hidden_layers=1)
    config = CompileConfig(model, tmp_path / "a", lora_slots=256, lora_rank=512, lora_experts=True, target="reference")
    with pytest.raises(
        CompileError,
        match=r"256 adapters of rank 512 of layers\.0\.mlp\.experts\.gate_up\.weight, 200 rows by 60 columns for each "
        r"of 90 experts, are more than kernels count; lower --lora-slots or --lora-rank",
    ):
        resolve(config).warnings()


def test_experts_are_asked_for(tiny_artifact: Any, tmp_path: Path) -> None:
    """Their slots take much memory; and not every model has experts that adapters know."""
    dbrx = make_tiny_model(tmp_path / "dbrx", "dbrx", **CASES["dbrx"][1])
    for model, family in ((tiny_artifact.model, "llama"), (dbrx, "dbrx")):
        says = f"--lora-experts is for mixtures, and no experts of {family} models take adapters"
        with pytest.raises(CompileError, match=says):
            compile_model(CompileConfig(model, tmp_path / "a", lora_slots=2, lora_experts=True))
    limits = AdapterLimits(2, 8, experts=True)
    model = make_tiny_model(tmp_path / "model", "mixtral", num_local_experts=3, num_hidden_layers=1)
    found = adapter_linears(load_config(model), limits)
    (gate_up, down) = (one for one in found.values() if one.experts)
    assert (gate_up.experts, gate_up.rows, gate_up.columns, down.rows) == (3, (100, 100), 60, (60,))
    assert [part.module for part in (*gate_up.parts, *down.parts)] == [
        f"model.layers.0.block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")
    ]
    assert limits_of({"lora": record(limits, found.values())}) == limits
    plain = AdapterLimits(2, 8)
    assert not any(one.experts for one in adapter_linears(load_config(model), plain).values())
    assert limits_of({"lora": record(plain, adapter_linears(load_config(model), plain).values())}) == plain


@pytest.mark.parametrize(("slots", "rank"), [(0, 8), (257, 8), (4, 0), (4, 513)])
def test_sizes_out_of_range(slots: int, rank: int, tiny_artifact: Any, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"--lora-(slots|rank) \d+ must be between 1 and"):
        compile_model(CompileConfig(tiny_artifact.model, tmp_path / "a", lora_slots=slots, lora_rank=rank))
