"""`llmc compile --tensor-parallel`: ranks in lockstep compute what one rank computes, and what cannot be divided is
refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import Bucket
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.partition import check_divisible
from llmc.compiler.pipeline import compile_model
from llmc.compiler.resolve import resolve
from llmc.compiler.store.bundle import BundleError, create_bundle
from llmc.compiler.targets.gpu.backend import GpuTarget
from llmc.graphs_format import PHASES, name_in_model
from llmc.quantize import QuantConfig, Recipe, get_scheme
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, random_tokens, relative_error, replay
from support.families import CASES
from support.inspected import inspected, inspected_text
from support.lockstep import Lockstep
from support.marks import rare
from support.tiny_models import make_tiny_model

LADDER = "prefill=2x16,decode=2x32,mixed=2x16"
SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
    "all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "parallel": ("gpt_neox", {"use_parallel_residual": True, "num_key_value_heads": 4}),
    "layernorm": ("starcoder2", {"use_bias": True}),
    "sandwich": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}),
    "heads": (
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 6,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "token-inputs": (
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 6,
            "num_kv_shared_layers": 1,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 516,
            "use_double_wide_mlp": True,
        },
    ),
    "alibi": ("bloom", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "gate": ("qwen3_next", {"layer_types": ["full_attention"] * 3, "num_experts": 0, "attention_bias": True}),
    "normed": (
        "minimax",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 4,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.8,
        },
    ),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "shared": (
        "qwen2_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 32,
        },
    ),
    "beside": (
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 6,
            "global_head_dim": 24, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
            "top_k_experts": 2, "moe_intermediate_size": 32,
        },
    ),
    "biases": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "one": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "latent": (
        "deepseek_v3",
        {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
}  # fmt: skip
"""Of which the third is divided by whole experts alone."""


def compiled(model: Path, output: Path, cache: Path, **options: Any) -> Path:
    given = {"buckets": LADDER, "dtype": "f32", "block_size": 16, "jobs": 1, "tokenizer": "none", **options}
    compile_model(CompileConfig(model=model, output=output, cache_dir=cache, **given))
    return output


def logits(artifact: Path) -> tuple[Lockstep, np.ndarray]:
    """Of two prompts, then of steps that decode one and prefill the other."""
    machine, pages = Lockstep(artifact, 8), Pages(8, 16)
    prefill, decode, mixed = (machine.graph(phase) for phase in PHASES)
    a, b = random_tokens(500, 12, 1), random_tokens(500, 9, 2)
    found = [replay(machine, prefill, pages, [(0, a[:8], 0), (1, b[:3], 0)])]  # type: ignore[arg-type]
    found.append(replay(machine, decode, pages, [(0, a[8:9], 8), (1, b[3:4], 3)]))  # type: ignore[arg-type]
    found.append(replay(machine, mixed, pages, [(0, a[9:10], 9), (1, b[4:9], 4)]))  # type: ignore[arg-type]
    return machine, np.concatenate(found)


OFTEN = ("gqa", "tied", "biases")


@pytest.mark.parametrize("name", [name if name in OFTEN else rare(name) for name in MODELS])
def test_ranks_compute_what_one_computes(name: str, tmp_path: Path, kernel_cache: Path) -> None:
    family, fields = MODELS[name]
    model = make_tiny_model(tmp_path / "model", family, **{**SIZES, **fields})
    _, wanted = logits(compiled(model, tmp_path / "one", kernel_cache))
    machine, found = logits(compiled(model, tmp_path / "two", kernel_cache, tensor_parallel=2))
    assert machine.num_ranks == 2
    assert relative_error(found, wanted) < 1e-5
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


# Graphs are divided before a target sees them.
OFTEN_DIVIDED = [("shared", True, "native"), ("experts", False, "reference"), ("latent", True, "reference")]


def mixture(name: str, folder: Path) -> Path:
    family, fields = MIXTURES[name]
    return make_tiny_model(folder / "model", family, **{**SIZES, **fields})


@pytest.mark.parametrize(
    ("name", "by_expert", "target"),
    [
        case if case in OFTEN_DIVIDED else rare(*case)
        for target in ("native", "reference")
        for name, by_expert in (
            *(("shared", True), ("experts", False), ("latent", True), ("latent", False), ("shared", False)),
            *(("experts", True), ("biases", True), ("one", True), ("one", False), ("beside", True), ("beside", False)),
        )
        for case in [(name, by_expert, target)]
    ],
)
def test_experts_are_divided(name: str, by_expert: bool, target: str, tmp_path: Path, kernel_cache: Path) -> None:
    model = mixture(name, tmp_path)
    _, wanted = logits(compiled(model, tmp_path / "one", kernel_cache, target=target))
    options: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": by_expert, "target": target}
    machine, found = logits(compiled(model, tmp_path / "two", kernel_cache, **options))
    assert machine.num_ranks == 2
    assert relative_error(found, wanted) < 1e-5
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("by_expert", [True, False])
def test_ranks_hold_experts_or_parts_of_all(by_expert: bool, tmp_path: Path, kernel_cache: Path) -> None:
    model, (experts, inner) = mixture("experts", tmp_path), (8, 64)
    options: dict[str, Any] = {"target": "reference", "buckets": "prefill=1x16,decode=1x16"}
    one = compiled(model, tmp_path / "one", kernel_cache, **options)
    two = compiled(model, tmp_path / "two", kernel_cache, tensor_parallel=2, expert_parallel=by_expert, **options)
    for name, shape in (("gate_up", (experts, 2, inner, -1)), ("down", (experts, -1, inner))):
        (whole,), pieces = (whole_of(one_of, f"layers.2.mlp.experts.{name}.weight") for one_of in (one, two))
        whole = whole.reshape(shape)
        places = [slice(0, None, None)] * whole.ndim
        for rank, piece in enumerate(pieces):
            axis = 0 if by_expert else 2
            half = whole.shape[axis] // 2
            places[axis] = slice(rank * half, (rank + 1) * half)
            np.testing.assert_array_equal(piece.reshape(-1), whole[tuple(places)].reshape(-1))
    if by_expert:
        places_of = [list(map(int, piece)) for piece in whole_of(two, "expert_places")]
        assert places_of == [[0, 1, 2, 3, 4, 4, 4, 4], [4, 4, 4, 4, 0, 1, 2, 3]]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output projection is its embedding; what can be divided is, by 2."""
    return make_tiny_model(tmp_path_factory.mktemp("tied") / "model", "qwen3", **SIZES, tie_word_embeddings=True)


def whole_of(artifact: Path, name: str) -> list[np.ndarray]:
    """What each rank has of a weight, as it is stored."""
    data, tables = np.fromfile(artifact / "weights.safetensors", np.uint8), read_graphs(artifact)
    found = []
    for rank in range(max(1, tables.model.num_ranks)):
        (weight,) = (one for one in tables.weights_of(rank) if name_in_model(one.name) == name)
        at = data[weight.file_offset : weight.file_offset + weight.bytes]
        found.append(at.view(np.float32).reshape(weight.shape))
    return found


def test_pieces_of_weights_are_the_whole(tied: Path, tmp_path: Path, kernel_cache: Path) -> None:
    options: dict[str, Any] = {"target": "reference", "buckets": "prefill=1x16,decode=1x16"}
    one = compiled(tied, tmp_path / "one", kernel_cache, **options)
    two = compiled(tied, tmp_path / "two", kernel_cache, tensor_parallel=2, **options)
    layer, inner = "layers.1", SIZES["intermediate_size"]
    for name, axis, parts in (
        (f"{layer}.attention.out.weight", 1, [64]),
        (f"{layer}.mlp.down.weight", 1, [inner]),
        (f"{layer}.attention.qkv.weight", 0, [64, 32, 32]),
        (f"{layer}.mlp.gate_up.weight", 0, [inner, inner]),
    ):
        (whole,), pieces = whole_of(one, name), whole_of(two, name)
        places = np.cumsum([part // 2 for part in parts])[:-1]
        split = [np.split(piece, places, axis) for piece in pieces]
        joined = np.concatenate([np.concatenate(part, axis) for part in zip(*split, strict=True)], axis)
        np.testing.assert_array_equal(joined, whole)
    # The embedding is divided by rows and is the head, too. Norms are stored once.
    (embedding,) = whole_of(one, "embed.weight")
    np.testing.assert_array_equal(np.concatenate(whole_of(two, "embed.weight")), embedding)
    assert [piece.tolist() for piece in whole_of(two, "first_token")] == [[0], [SIZES["vocab_size"] / 2]]
    stored = Counter(name_in_model(weight.name) for weight in read_graphs(two).weights)
    assert stored["embed.weight"] == stored[f"{layer}.attention.qkv.weight"] == 2
    assert (stored[f"{layer}.mlp_norm.weight"], stored["lm_head.weight"]) == (1, 0)


@pytest.mark.parametrize("scheme", ["w4a16", rare("w8a8"), rare("w8a16"), rare("mxfp4")])
def test_quantized_weights_are_divided(scheme: str, tied: Path, tmp_path: Path, kernel_cache: Path) -> None:
    quant = QuantConfig(scheme, group_size=32) if scheme == "w4a16" else QuantConfig(scheme)
    options: dict[str, Any] = {"quant": quant, "target": "reference"}
    _, wanted = logits(compiled(tied, tmp_path / "one", kernel_cache, **options))
    machine, found = logits(compiled(tied, tmp_path / "two", kernel_cache, tensor_parallel=2, **options))
    assert machine.num_ranks == 2
    # Groups are the same numbers; a scale of a whole row is each rank's own, and so are those of int8 activations.
    assert relative_error(found, wanted) < (0.1 if scheme in ("w8a8", "w8a16") else 1e-5)


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({}, {"tensor_parallel": 3}, "4 attention heads cannot be divided among 3 ranks"),
        ({}, {"tensor_parallel": 4}, "2 KV heads cannot be divided among 4 ranks"),
        ({"intermediate_size": 97}, {}, "97 elements inside the feed-forward block cannot be divided"),
        ({"vocab_size": 515}, {}, "515 tokens of the vocabulary cannot be divided among 2 ranks"),
        ({}, {"tensor_parallel": 257}, "tensor-parallel is 257, but 2 to 256 ranks"),
        ({}, {"expert_parallel": True}, "llama has no experts: leave out --expert-parallel"),
        ({}, {"lora_slots": 2}, "--lora-slots and --tensor-parallel do not go together"),
        (
            {},
            {"quant": QuantConfig("w4a16", group_size=128)},
            r"layers.0.attention.out.weight is stored in symmetric groups of 128 along its 64 columns, of which 2",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    fields: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", **{**SIZES, **fields})
    given: dict[str, Any] = {"tensor_parallel": 2, "dtype": "f32", "buckets": LADDER, "block_size": 16, **options}
    with pytest.raises(CompileError, match=said) as caught:
        resolve(CompileConfig(model=model, output=tmp_path / "out", **given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["tensor_parallel", "pipeline_parallel"])
def test_a_target_without_ranks_is_refused(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", **SIZES)
    monkeypatch.setattr(GpuTarget, "runs_ranks", False)
    said = (
        f"opencl is for devices of kind opencl, as which ranks do not run yet: leave out --{option.replace('_', '-')}"
    )
    given: dict[str, Any] = {"target": "opencl", "buckets": LADDER, option: 2}
    with pytest.raises(CompileError, match=said):
        resolve(CompileConfig(model, tmp_path / "out", **given))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma3n_text", "has several"),
        ("olmo2", "norms all"),
    ],
)
def test_models_of_other_kinds_are_refused(family: str, said: str, tmp_path: Path) -> None:
    fields = CASES[family][1] if family in ("minicpm3", "gemma3n_text") else {}
    model = make_tiny_model(tmp_path / "model", family, **fields)
    with pytest.raises(CompileError, match=f"{family} ({said})"):
        resolve(CompileConfig(model=model, output=tmp_path / "out", tensor_parallel=2))


@pytest.mark.parametrize(
    ("name", "by_expert", "ranks", "said"),
    [
        ("biases", False, 2, "experts of gpt_oss have biases, so a rank has whole ones: add --expert-parallel"),
        ("shared", True, 4, "6 experts cannot be divided among 4 ranks"),
        ("experts", False, 3, "64 elements inside an expert cannot be divided among 3 ranks"),
        ("experts", True, 1, "--expert-parallel divides experts among ranks: add --tensor-parallel N"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    name: str, by_expert: bool, ranks: int, said: str, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    family, fields = MIXTURES[name]
    model = make_tiny_model(tmp_path / "model", family, **{**SIZES, **fields, **heads})
    with pytest.raises(CompileError, match=said):
        resolve(CompileConfig(model=model, output=tmp_path, tensor_parallel=ranks, expert_parallel=by_expert))


def test_act_order_along_divided_columns_is_refused(tied: Path, tmp_path: Path) -> None:
    model = resolve(CompileConfig(model=tied, output=tmp_path / "out")).model
    w4 = get_scheme("w4a16")
    schemes = {"layers.0.mlp.down.weight": replace(w4, weight=w4.weight.regrouped(32, None))}
    recipe = Recipe(schemes, act_order=frozenset(schemes))
    with pytest.raises(CompileError, match=r"layers.0.mlp.down.weight is in act-order"):
        check_divisible(model, recipe, 2)
    check_divisible(model, Recipe(schemes), 2)


def test_buckets_are_added_and_no_bundle_is_made(tied: Path, tmp_path: Path, kernel_cache: Path) -> None:
    options: dict[str, Any] = {"target": "reference", "tensor_parallel": 2}
    artifact = compiled(tied, tmp_path / "out", kernel_cache, buckets="prefill=1x16,decode=1x32", **options)
    before = read_graphs(artifact)
    add_buckets(artifact, [Bucket.parse("decode:1x16")], cache_dir=kernel_cache, jobs=1)
    after = read_graphs(artifact)
    assert after.collectives[: len(before.collectives)] == before.collectives
    assert (len(after.graphs), after.weights, after.model) == (len(before.graphs) + 1, before.weights, before.model)
    with pytest.raises(BundleError, match="is for 2 ranks, which a bundle does not hold yet"):
        create_bundle([artifact], tmp_path / "bundle.tar")
    data = inspected(artifact)["ranks"]
    layers = SIZES["num_hidden_layers"]
    width, vocab = SIZES["hidden_size"], SIZES["vocab_size"]
    assert data["joins"][-1] == {
        "bucket": "decode:1x16", "collectives": 2 * layers + 2, "bytes": 4 * ((2 * layers + 1) * width + vocab)
    }  # fmt: skip
    text = inspected_text(artifact)
    assert "\nranks: 2, which run each step together" in text
    assert f"{2 * layers + 2} results" in text
