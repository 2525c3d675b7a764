"""LoRA adapters that are merged: values against the formula, PEFT's files, and adapters that cannot be merged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from llmc.compiler.adapters import AdapterLimits, adapter_linears
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.pipeline import compile_model
from llmc.models.errors import ModelError
from llmc.models.sources.lora.adapter import LoraAdapter
from llmc.models.sources.registry import open_source

from support.adapters import merged_values
from support.families import CASES
from support.gguf_models import write_gguf
from support.inspected import inspected, inspected_text
from support.tiny_models import make_tiny_model

PREFIX = "base_model.model."
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def make_adapter(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({PREFIX + name: value for name, value in tensors.items()}, path / "adapter_model.safetensors")
    return path


def low_rank(module: str, rows: int, columns: int, rank: int = 4) -> dict[str, np.ndarray]:
    return {f"{module}.lora_A.weight": floats(rank, columns), f"{module}.lora_B.weight": floats(rows, rank)}


def product(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    return np.asarray(tensors[f"{module}.lora_B.weight"].astype(np.float64) @ tensors[f"{module}.lora_A.weight"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("lora") / "model", "llama")


def weights(model: Path) -> dict[str, np.ndarray]:
    return load_file(model / "model.safetensors")


def test_products_are_added_and_the_rest_stays(model: Path, tmp_path: Path) -> None:
    tensors = low_rank(Q, 60, 60) | low_rank(DOWN, 60, 100)
    found, plain = merged_values(model, make_adapter(tmp_path / "a", tensors)), merged_values(model)
    changed = {name for name in plain if not np.array_equal(found[name], plain[name])}
    assert changed == {"layers.0.attention.qkv.weight", "layers.1.mlp.down.weight"}
    for name, module in (("layers.0.attention.qkv.weight", Q), ("layers.1.mlp.down.weight", DOWN)):
        expected = weights(model)[f"{module}.weight"] + 1.5 * product(tensors, module)
        np.testing.assert_array_equal(found[name][:60], expected.astype(np.float32))
    np.testing.assert_array_equal(
        found["layers.0.attention.qkv.weight"][60:], plain["layers.0.attention.qkv.weight"][60:]
    )


def test_any_rows_are_the_same_rows(model: Path, tmp_path: Path) -> None:
    """Weights are packed some rows at a time, by any number of threads."""
    source = open_source(model, [make_adapter(tmp_path / "a", low_rank("lm_head", 515, 60))])
    tensor = source.checkpoint().tensor("lm_head.weight")
    whole = np.empty((515, 60), np.float32)
    tensor.read(0, whole)
    for first, count in ((0, 1), (63, 2), (100, 300), (514, 1)):
        some = np.empty((count, 60), np.float32)
        tensor.read(first, some)
        np.testing.assert_array_equal(some, whole[first : first + count])


def test_an_adapter_stays_in_its_file(model: Path, tmp_path: Path) -> None:
    """Also one of 16-bit numbers, which are the same numbers in float32."""
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in low_rank(Q, 60, 60).items()}
    adapter = make_adapter(tmp_path / "a", tensors)
    (change,) = LoraAdapter.read(adapter).low_rank.values()
    assert not change.a.flags.owndata
    assert not change.b.flags.owndata
    wide = make_adapter(tmp_path / "b", {name: value.astype(np.float32) for name, value in tensors.items()})
    found, expected = merged_values(model, adapter), merged_values(model, wide)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_scales_and_ranks_of_patterns(model: Path, tmp_path: Path) -> None:
    tensors = low_rank(Q, 60, 60, 2) | low_rank(DOWN, 60, 100, 9)
    patterns = {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 9}, "alpha_pattern": {"down_proj": 12}}
    found = merged_values(model, make_adapter(tmp_path / "a", tensors, use_rslora=True, **patterns))
    for name, module, scale in (
        ("layers.0.attention.qkv.weight", Q, 6 / math.sqrt(2)),
        ("layers.1.mlp.down.weight", DOWN, 12 / 3),
    ):
        expected = weights(model)[f"{module}.weight"] + scale * product(tensors, module)
        np.testing.assert_allclose(found[name][:60], expected, rtol=1e-6, atol=1e-6)


def test_dora_gives_rows_their_lengths(model: Path, tmp_path: Path) -> None:
    tensors = low_rank(DOWN, 60, 100) | {f"{DOWN}.lora_magnitude_vector": np.abs(floats(60)) + 1}
    found = merged_values(model, make_adapter(tmp_path / "a", tensors, use_dora=True))["layers.1.mlp.down.weight"]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), tensors[f"{DOWN}.lora_magnitude_vector"], rtol=1e-6)
    direction = weights(model)[f"{DOWN}.weight"] + 1.5 * product(tensors, DOWN)
    cosine = np.sum(found * direction, 1) / np.linalg.norm(found, axis=1) / np.linalg.norm(direction, axis=1)
    np.testing.assert_allclose(cosine, 1, atol=1e-6)


def test_embeddings_whole_tensors_and_several_adapters(model: Path, tmp_path: Path) -> None:
    a, b = floats(4, 515), floats(60, 4)
    embedding = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    first = make_adapter(tmp_path / "first", embedding | {"lm_head.weight": floats(515, 60)})
    second = make_adapter(tmp_path / "second", low_rank("lm_head", 515, 60))
    found = merged_values(model, first, second)
    head, change = load_file(first / "adapter_model.safetensors"), load_file(second / "adapter_model.safetensors")
    np.testing.assert_allclose(
        found["embed.weight"], weights(model)["model.embed_tokens.weight"] + 1.5 * (b @ a).T, rtol=1e-5, atol=1e-5
    )
    expected = head[f"{PREFIX}lm_head.weight"] + 1.5 * product(change, f"{PREFIX}lm_head")
    np.testing.assert_allclose(found["lm_head.weight"], expected, rtol=1e-6, atol=1e-6)
    notes = open_source(model, [first, second]).checkpoint().notes()
    assert notes == (
        "the adapter first is merged (matrices of rank 4: 1; whole tensors: 1)",
        "the adapter second is merged (matrices of rank 4: 1)",
    )


@pytest.mark.parametrize("said", [False, True])
def test_transposed_matrices_of_gpt2(said: bool, tmp_path: Path) -> None:
    """Its checkpoints may leave out what the names of its class begin with, and its matrices lie [columns, rows]. PEFT
    writes `fan_in_fan_out` for the last of the changed layers, of which the output projection lies otherwise."""
    model = make_tiny_model(tmp_path / "gpt2", "gpt2", n_embd=60, n_head=3, n_layer=1, n_inner=100)
    block = "transformer.h.0"
    tensors = low_rank(f"{block}.mlp.c_fc", 100, 60) | low_rank(f"{block}.attn.c_proj", 60, 60)
    tensors |= low_rank("lm_head", 515, 60)
    found, plain = (
        merged_values(model, make_adapter(tmp_path / "a", tensors, fan_in_fan_out=said)),
        merged_values(model),
    )
    for name, module in (
        ("layers.0.mlp.up", f"{block}.mlp.c_fc"),
        ("layers.0.attention.out", f"{block}.attn.c_proj"),
        ("lm_head", "lm_head"),
    ):
        expected = plain[f"{name}.weight"] + 1.5 * product(tensors, module)
        np.testing.assert_allclose(found[f"{name}.weight"], expected, rtol=1e-6, atol=1e-6)


def test_dora_of_transposed_matrices_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "gpt2", "gpt2", n_embd=60, n_head=3, n_layer=1, n_inner=100)
    module = "transformer.h.0.mlp.c_fc"
    tensors = low_rank(module, 100, 60) | {f"{module}.lora_magnitude_vector": np.abs(floats(100)) + 1}
    with pytest.raises(ModelError, match=r"mlp\.c_fc\.weight has lengths of DoRA for a matrix that"):
        merged_values(model, make_adapter(tmp_path / "a", tensors))


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        ({}, {}, "has no tensors, so there is nothing to merge"),
        ({}, {"peft_type": "IA3"}, r"peft_type is 'IA3'; llmc merges only LORA adapters"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({}, {"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({}, {"lora_bias": True}, "lora_bias is True, which llmc does not know of LoRA adapters; take it out if"),
        (low_rank(Q, 60, 60), {"layer_replication": [[0, 1]]}, r"layer_replication is \[\[0, 1\]\], which llmc"),
        (low_rank(Q, 60, 60), {"a_newer_kind": {"factor": 2}}, "a_newer_kind is {'factor': 2}, which llmc"),
        (low_rank(Q, 60, 60), {"r": 8}, "has rank 4 where adapter_config.json says 8"),
        (low_rank(Q, 60, 61), {}, r"changes \S+q_proj.weight as a tensor of shape \[60, 61\], which has \[60, 60\]"),
        (low_rank("model.layers.7.mlp.up_proj", 100, 60), {}, r"model\.layers\.7\.mlp\.up_proj\.weight, which the"),
        ({f"{Q}.lora_A.weight": floats(4, 60)}, {}, "has one of lora_A and lora_B and not the other"),
        ({f"{Q}.lora_C.weight": floats(4, 60)}, {}, "is a part of LoRA that llmc does not know"),
        ({f"{Q}.lora_A.weight": floats(4, 60), f"{Q}.lora_B.weight": floats(60, 4) * np.inf}, {}, "infinite or not"),
        (low_rank(Q, 60, 60), {"rank_pattern": {"(": 3}}, r"rank_pattern has '\(', which is not a pattern"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_one_sentence(
    tensors: dict[str, np.ndarray], config: dict[str, Any], sentence: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        merged_values(model, make_adapter(tmp_path / "a", tensors, **config))


def test_settings_that_say_nothing_are_passed_over(model: Path, tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"a_newer_kind": None, "another": False, "third": {}, "lora_bias": False}
    training = {"lora_dropout": 0.1, "target_modules": ["q_proj"], "peft_version": "0.21.2", "task_type": "CAUSAL_LM"}
    adapter = make_adapter(tmp_path / "a", low_rank(Q, 60, 60), **nothing, **training)
    assert merged_values(model, adapter)


@pytest.mark.parametrize("begin", ["model.", ""])
def test_changes_of_a_tower_for_images_are_left_out(begin: str, tmp_path: Path) -> None:
    """By the names of both versions of transformers, whichever the checkpoint has; whole tensors as well."""
    llava = make_tiny_model(tmp_path / "model", "llava", num_hidden_layers=1)
    of_text = "model.language_model.layers.0.self_attn.q_proj"
    text, tower = low_rank(of_text, 60, 60), low_rank(f"{begin}vision_tower.encoder.layers.0.self_attn.q_proj", 16, 16)
    tower |= {f"{begin}multi_modal_projector.linear_1.weight": floats(60, 16)}
    both, alone = (make_adapter(tmp_path / name, tensors) for name, tensors in (("both", text | tower), ("text", text)))
    found, wanted = merged_values(llava, both), merged_values(llava, alone)
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())
    said, merged = open_source(llava, [both]).checkpoint().notes()
    assert said == "the adapter both also changes parts that llmc does not run, which is left out (2)"
    assert merged == "the adapter both is merged (matrices of rank 4: 1)"
    with pytest.raises(ModelError, match="changes no part of the model that reads text; leave it out"):
        merged_values(llava, make_adapter(tmp_path / "none", tower))


def test_directories_that_are_no_adapters(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json; give the directory of a LoRA adapter"):
        merged_values(model, tmp_path)
    adapter = make_adapter(tmp_path / "a", low_rank(Q, 60, 60))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors or adapter_model\.bin; save the"):
        merged_values(model, adapter)


def test_weights_as_torch_saves_them(model: Path, tmp_path: Path) -> None:
    """They give the values of safetensors, which are read where there are both; a pickle's code is never run."""
    adapter = make_adapter(tmp_path / "a", low_rank(Q, 60, 60))
    stored, saved = adapter / "adapter_model.safetensors", adapter / "adapter_model.bin"
    tensors = {name: torch.from_numpy(value) for name, value in load_file(stored).items()}
    expected = merged_values(model, adapter)
    torch.save({name: 2 * value for name, value in tensors.items()}, saved)
    found = merged_values(model, adapter)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    stored.unlink()
    # B is transposed in memory, as after training in that layout.
    torch.save({name: value.T.contiguous().T if "lora_B" in name else value for name, value in tensors.items()}, saved)
    found = merged_values(model, adapter)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert saved in set(open_source(model, [adapter]).weight_files())
    torch.save({**tensors, "config": Path("x")}, saved)
    with pytest.raises(ModelError, match=r"adapter_model\.bin names pathlib.*llmc runs nothing that a pickle names"):
        merged_values(model, adapter)


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_output_projection_becomes_one_of_its_own(stored: bool, model: Path, tmp_path: Path) -> None:
    """The embedding stays. stored: the checkpoint has it by the projection's name, too."""
    tied = make_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    if stored:
        copy = weights(tied)["model.embed_tokens.weight"].copy()
        save_file(weights(tied) | {"lm_head.weight": copy}, tied / "model.safetensors")
    tensors, embedding = low_rank("lm_head", 515, 60), weights(tied)["model.embed_tokens.weight"]
    adapter = make_adapter(tmp_path / "a", tensors)
    found = merged_values(tied, adapter)
    np.testing.assert_array_equal(found["embed.weight"], embedding)
    expected = embedding + 1.5 * product(tensors, "lm_head")
    np.testing.assert_allclose(found["lm_head.weight"], expected, rtol=1e-6, atol=1e-6)
    assert not open_source(tied, [adapter]).config().tie_word_embeddings
    other = make_adapter(tmp_path / "b", low_rank(Q, 60, 60))
    assert open_source(tied, [other]).config().tie_word_embeddings
    assert "lm_head.weight" not in merged_values(tied, other)


EMBED = "model.embed_tokens"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    return make_tiny_model(folder / "model", "llama", tie_word_embeddings=True, num_hidden_layers=1)


def of_embedding() -> dict[str, np.ndarray]:
    return {f"{EMBED}.lora_embedding_A": floats(4, 515), f"{EMBED}.lora_embedding_B": floats(60, 4)}


def change_of(tensors: dict[str, np.ndarray], end: str) -> np.ndarray:
    if end == "lm_head":
        return 1.5 * product(tensors, end)
    a, b = (tensors[f"{EMBED}.lora_embedding_{part}"].astype(np.float64) for part in "AB")
    return np.asarray(1.5 * (b @ a).T)


def with_base(tied: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As PEFT saves adapters of embeddings and output projections: with the weight that they were trained on."""
    modules = {name.split(".lora_")[0] for name in tensors}
    return tensors | {f"{module}.base_layer.weight": weights(tied)[f"{EMBED}.weight"] for module in modules}


def assert_ends(found: dict[str, np.ndarray], embedding: np.ndarray, head: np.ndarray) -> None:
    np.testing.assert_allclose(found["embed.weight"], embedding, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found["lm_head.weight"], head, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_a_tied_embedding_changes_alone(whole: bool, tied: Path, tmp_path: Path) -> None:
    base = weights(tied)[f"{EMBED}.weight"]
    tensors = {f"{EMBED}.weight": floats(515, 60)} if whole else with_base(tied, of_embedding())
    expected = tensors[f"{EMBED}.weight"] if whole else base + change_of(tensors, EMBED)
    assert_ends(merged_values(tied, make_adapter(tmp_path / "a", tensors)), expected, base)


def test_adapters_of_tied_ends_add_up(tied: Path, tmp_path: Path) -> None:
    """In any order, though each brings the weight that it was trained on."""
    base = weights(tied)[f"{EMBED}.weight"]
    changes = [of_embedding(), low_rank("lm_head", 515, 60), of_embedding() | low_rank("lm_head", 515, 60)]
    adapters = [make_adapter(tmp_path / str(i), with_base(tied, one)) for i, one in enumerate(changes)]
    embedding = base + sum(change_of(one, EMBED) for one in (changes[0], changes[2]))
    head = base + sum(change_of(one, "lm_head") for one in changes[1:])
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        assert_ends(merged_values(tied, *(adapters[i] for i in order)), embedding, head)


def test_a_whole_tensor_goes_before_what_an_adapter_was_trained_on(tied: Path, tmp_path: Path) -> None:
    """It replaces earlier changes too. Another base of an embedding is that of both ends."""
    base, tensors = weights(tied)[f"{EMBED}.weight"], with_base(tied, low_rank("lm_head", 515, 60))
    change = make_adapter(tmp_path / "change", tensors)
    head = {"lm_head.weight": floats(515, 60)}
    whole = make_adapter(tmp_path / "whole", head)
    expected = head["lm_head.weight"] + change_of(tensors, "lm_head")
    assert_ends(merged_values(tied, whole, change), base, expected)
    assert_ends(merged_values(tied, change, whole), base, head["lm_head.weight"])
    other = of_embedding() | {f"{EMBED}.base_layer.weight": floats(515, 60)}
    new = other[f"{EMBED}.base_layer.weight"]
    assert_ends(merged_values(tied, make_adapter(tmp_path / "other", other)), new + change_of(other, EMBED), new)


def test_a_tied_output_projection_of_a_gguf(tmp_path: Path) -> None:
    """It has no tensor there, by no name."""
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}
    model = make_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True, **sizes)
    file = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    tensors = low_rank("lm_head", 515, 96)
    found, plain = merged_values(file, make_adapter(tmp_path / "a", tensors)), merged_values(file)
    expected = plain["embed.weight"] + 1.5 * product(tensors, "lm_head")
    np.testing.assert_allclose(found.pop("lm_head.weight"), expected, rtol=1e-6, atol=1e-6)
    assert "lm_head.weight" not in plain
    assert all(np.array_equal(found[name], plain[name]) for name in plain)


def test_an_output_projection_by_transformers_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "gpt_neox", num_hidden_layers=1, rotary_pct=0.5)
    tensors = low_rank("lm_head", 515, 60)
    found = merged_values(model, make_adapter(tmp_path / "a", tensors))["lm_head.weight"]
    expected = merged_values(model)["lm_head.weight"] + 1.5 * product(tensors, "lm_head")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_experts(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "mixtral", num_local_experts=3, num_hidden_layers=1)
    module = "model.layers.0.block_sparse_moe.experts.1"
    tensors = low_rank(f"{module}.w3", 100, 60) | low_rank(f"{module}.w2", 60, 100)
    found, plain = merged_values(model, make_adapter(tmp_path / "a", tensors)), merged_values(model)
    for name, part, rows in (("gate_up", "w3", slice(300, 400)), ("down", "w2", slice(60, 120))):
        weight = f"layers.0.mlp.experts.{name}.weight"
        expected = plain[weight].copy()
        expected[rows] += 1.5 * product(tensors, f"{module}.{part}")
        np.testing.assert_allclose(found[weight], expected, rtol=1e-6, atol=1e-6)


def test_keys_and_values_of_latent_attention(tmp_path: Path) -> None:
    """Merged, though no slot takes them: each head's half is of the merged matrix."""
    family, sizes = CASES["deepseek_v3"]
    model = make_tiny_model(tmp_path / "model", family, **sizes)
    tensors, module = weights(model), "model.layers.1.self_attn.kv_b_proj"
    rows, columns = tensors[f"{module}.weight"].shape
    change = low_rank(module, rows, columns)
    found, plain = merged_values(model, make_adapter(tmp_path / "a", change)), merged_values(model)
    changed = {name for name in plain if not np.array_equal(found[name], plain[name])}
    assert changed == {f"layers.1.attention.{part}_up.weight" for part in ("key", "value")}
    tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + 1.5 * product(change, module)).astype(np.float32)
    save_file(tensors, model / "model.safetensors")
    expected = merged_values(model)
    for name in changed:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6)


NOT_BY_NAME = {"dbrx": ".experts.", "baichuan-2": "lm_head"}


@pytest.mark.parametrize("case", NOT_BY_NAME)
def test_what_no_slot_takes(case: str, tmp_path: Path) -> None:
    """As docs/lora.md says. The sentence of a refusal is in tests/runtime/adapters."""
    family, sizes = CASES[case]
    config = open_source(make_tiny_model(tmp_path / "model", family, **sizes)).config()
    linears = adapter_linears(config, AdapterLimits(1, 4, experts=True)).values()
    modules = {part.module for linear in linears for part in linear.parts}
    assert modules
    assert not any(NOT_BY_NAME[case] in module for module in modules)


def test_an_artifact_says_what_is_merged(model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """Its weights are those of the merged model; another adapter makes another artifact."""
    tensors = low_rank(Q, 60, 60)
    adapter = make_adapter(tmp_path / "a", tensors)
    merged = weights(model)
    merged[f"{Q}.weight"] = (merged[f"{Q}.weight"] + 1.5 * product(tensors, Q)).astype(np.float32)
    by_hand = make_tiny_model(tmp_path / "by-hand", "llama")
    save_file(merged, by_hand / "model.safetensors", metadata={"format": "pt"})

    def compiled(name: str, source: Path, *adapters: Path) -> Path:
        config = CompileConfig(
            source, tmp_path / name, "prefill=[1]x[16],decode=[1]x[32]", dtype="f32", block_size=16, jobs=1,
            cache_dir=kernel_cache, merge_lora=adapters,
        )  # fmt: skip
        report = compile_model(config)
        assert any("the adapter a is merged" in note for note in report.notes) == bool(adapters)
        return config.output

    ours, theirs = compiled("ours", model, adapter), compiled("theirs", by_hand)
    assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()
    manifest = json.loads((ours / "manifest.json").read_text())
    assert [merged["name"] for merged in manifest["merged_lora"]] == ["a"]
    assert "merged_lora" not in json.loads((theirs / "manifest.json").read_text())
    assert "\nLoRA adapters merged: a\n" in inspected_text(ours)
    assert inspected(ours)["merged_lora"] == manifest["merged_lora"]
    with pytest.raises(CompileError, match="overwrite"):
        compiled("ours", model)


def test_values_are_rounded_once(model: Path, tmp_path: Path) -> None:
    tensors = low_rank(Q, 60, 60)
    source = open_source(model, [make_adapter(tmp_path / "a", tensors)])
    found = np.empty((60, 60), ml_dtypes.bfloat16)
    source.checkpoint().tensor(f"{Q}.weight").read(0, found)
    exact = weights(model)[f"{Q}.weight"] + 1.5 * product(tensors, Q)
    np.testing.assert_array_equal(found, exact.astype(np.float32).astype(ml_dtypes.bfloat16))
