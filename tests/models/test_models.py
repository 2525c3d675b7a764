"""Models against transformers on the same weights, in float32, eagerly, over a paged cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.export import Dim
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmc.models import (
    ArrayTensor,
    ModelError,
    Rope,
    build_model,
    cos_sin_table,
    get_family,
    load_config,
    open_source,
)
from llmc.models.eager import as_tensor, load_model
from llmc.models.loader import load_parameters
from llmc.models.ops import torch_act_dtype

from support.paged_reference import PagedRunner, check_equals_transformers
from support.paths import SHARED
from support.tiny_models import FAMILIES, ModelFields, make_tiny_model

STORIES = SHARED / "models" / "stories260k"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-factor": {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-exact": {**YARN, "truncate": False},
}


def rope(kind: str) -> ModelFields:
    return {"rope_parameters": {"rope_theta": 10000.0, **ROPE_KINDS[kind]}}


CASES: dict[str, tuple[str, ModelFields]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-groups-1": ("llama", {"num_key_value_heads": 3, "num_hidden_layers": 1}),
    "llama-groups-7": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 63}),
    "mistral": ("mistral", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2-ignored-window": ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias-layer-types": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    **{f"rope-{kind}": ("llama", rope(kind)) for kind in ROPE_KINDS if kind != "default"},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give in tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    check_equals_transformers(make_tiny_model(tmp_path / "m", family, **overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_equals_each_alone(family: str, tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m", family))
    prompts = [[5, 6, 7, 8, 9], [100], [300, 301, 302]]
    together = PagedRunner(model, num_seqs=3, block_size=16, seed=3)
    batch = together.step(prompts)
    batch = [torch.cat(pair) for pair in zip(batch, together.step([[10], [11, 12], []]), strict=True)]
    for prompt, more, logits in zip(prompts, ([10], [11, 12], []), batch, strict=True):
        alone = PagedRunner(model).step([prompt + more])[0]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_window_hides_old_tokens(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "mistral", num_hidden_layers=1, sliding_window=4)
    model = load_model(path)
    tail = [9, 10, 11, 12]
    first = PagedRunner(model).step([[3, 4, 5, *tail]])[0][-1]
    second = PagedRunner(model).step([[7, 8, 6, *tail]])[0][-1]
    assert torch.equal(first, second)
    assert not torch.equal(first, PagedRunner(model).step([[3, 4, 5, 8, 10, 11, 12]])[0][-1])
    wide = PagedRunner(model).step([[3, 4, 5, 7, *tail[1:]]])[0][-1]
    assert not torch.equal(first, wide)


def test_window_of_one_sees_its_own_token_alone(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m", "mistral", sliding_window=1))
    first, second = (PagedRunner(model).greedy(prompt, 8) for prompt in ([3, 4, 5, 9], [300, 9]))
    assert first[0] == second[0]
    torch.testing.assert_close(first[1], second[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.03), ("f16", 0.004)])
def test_16_bits_are_close_to_f32(dtype: str, bound: float, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3", dtype=torch_act_dtype(dtype))
    assert load_config(path).dtype == dtype
    exact, rounded = (PagedRunner(load_model(path, act)).step([[3, 4, 5, 6]])[0] for act in ("f32", dtype))
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < bound * exact.norm()


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("max_len", [128, 300])
def test_rope_table_equals_transformers(kind: str, max_len: int, tmp_path: Path) -> None:
    fields: ModelFields = {"num_hidden_layers": 1, **rope(kind)}
    path = make_tiny_model(tmp_path / "m", "llama", **fields)
    reference = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(path))
    cos, sin = reference(torch.zeros(1), torch.arange(max_len)[None])
    expected = torch.cat((cos[0, :, :10], sin[0, :, :10]), dim=-1)
    table = cos_sin_table(load_config(path).rope, max_len)
    assert table.dtype == np.float32
    # transformers' cosines are torch's, within one unit of the last place of the exact ones, which the table has.
    assert np.abs(table - expected.numpy()).max() <= 2**-23 * max(1.0, float(np.abs(table).max()))
    assert (table == expected.numpy()).mean() > 0.8


def test_old_and_new_rope_spellings_agree(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", **rope("llama3"))
    new = load_config(path)
    fields = json.loads((path / "config.json").read_text())
    table = fields.pop("rope_parameters")
    fields["rope_theta"] = table.pop("rope_theta")
    fields["rope_scaling"] = {"type": table.pop("rope_type"), **table}
    fields["torch_dtype"] = fields.pop("dtype")
    (path / "config.json").write_text(json.dumps(fields))
    assert load_config(path) == new
    assert new.rope.scaling is not None
    assert new.rope.scaling.factor == 8.0


def test_partial_rotary_factor_rotates_the_leading_elements(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "phi3")
    assert load_config(path).rope == Rope(10000.0, 20)
    table = json.loads((path / "config.json").read_text())["rope_parameters"]
    edit_config(path, rope_parameters={**table, "partial_rotary_factor": 0.5})
    assert load_config(path).rope == Rope(10000.0, 10)


@pytest.mark.parametrize("within", [False, True])
def test_partial_rotary_factor_is_refused_where_whole_heads_are_rotated(within: bool, tmp_path: Path) -> None:
    """As transformers does, which does not read it."""
    path = make_tiny_model(tmp_path / "m", "llama")
    table = json.loads((path / "config.json").read_text())["rope_parameters"]

    def state(share: float) -> None:
        told = {"partial_rotary_factor": share}
        edit_config(path, **({"rope_parameters": {**table, **told}} if within else told))

    state(0.5)
    where = "rope_parameters.partial_rotary_factor" if within else "partial_rotary_factor"
    with pytest.raises(ModelError, match=rf"config.json: {where} is 0.5, which llmc does not know of llama models"):
        load_config(path)
    allowed = open_source(path, allow_unknown_config=True)
    assert allowed.config().rope == Rope(10000.0, 20)
    assert any(where in sentence for sentence in allowed.ignored_config())
    state(1.0)
    assert load_config(path).rope == Rope(10000.0, 20)


def edit_config(path: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes one."""
    fields = json.loads((path / "config.json").read_text())
    fields = {k: v for k, v in {**fields, **changes}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(fields))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "reformer"}, r"'reformer' is not supported; supported are llama, mistral, qwen2, qwen3"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            r"LlamaForCausalLMEagle3 is a head .* compile that model",
        ),
        ({"model_type": None}, r"config\.json lacks the field 'model_type'"),
        ({"hidden_size": None}, r"config\.json lacks the field 'hidden_size'"),
        ({"hidden_size": "64"}, r"'hidden_size' is '64' where an integer"),
        ({"num_hidden_layers": True}, r"'num_hidden_layers' is True"),
        ({"vocab_size": 0}, r"'vocab_size' is 0"),
        ({"num_key_value_heads": 2}, r"3 is not a multiple of num_key_value_heads 2"),
        ({"hidden_act": "mish"}, r"hidden_act 'mish'"),
        ({"rms_norm_eps": -1.0}, r"'rms_norm_eps' is -1.0"),
        ({"rope_parameters": {"rope_type": "short"}}, r"rope type 'short' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"lacks the field 'factor'"),
        ({"head_dim": 15}, r"rotates 15 elements"),
        ({"dtype": "int8"}, r"dtype 'int8'"),
        ({"tie_word_embeddings": 1}, r"'tie_word_embeddings' is 1 where true or false"),
    ],
)
def test_config_errors(tiny: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(tiny, **changes)
    with pytest.raises(ModelError, match=message):
        load_config(tiny)


def test_config_files_that_are_not_there_or_not_json(tiny: Path) -> None:
    with pytest.raises(ModelError, match="nothing does not exist: give"):
        load_config(tiny / "nothing")
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        load_config(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(ModelError, match=r"nor a model directory \(no config.json\)"):
        load_config(tiny)


def test_generation_config_wins(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": 4}))
    config = load_config(tiny)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 9), 4)
    (tiny / "generation_config.json").unlink()
    config = load_config(tiny)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_an_end_outside_the_vocabulary_is_named_with_its_file(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 515]}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id 515 is outside the vocabulary of 515"):
        load_config(tiny)
    (tiny / "generation_config.json").unlink()
    edit_config(tiny, bos_token_id=600)
    with pytest.raises(ModelError, match=r"/config\.json: bos_token_id 600 is outside the vocabulary of 515 tok"):
        load_config(tiny)


def test_unknown_family() -> None:
    with pytest.raises(ModelError, match=r"'Llama' is not supported; supported are llama"):
        get_family("Llama")


def parameters(path: Path, act_dtype: str = "f32") -> dict[str, torch.Tensor]:
    found = load_parameters(load_config(path), open_source(path).checkpoint(), act_dtype)
    return {p.name: as_tensor(p.value()) for p in found}


def test_sharded_checkpoint_is_the_same(tmp_path: Path) -> None:
    whole = make_tiny_model(tmp_path / "a", "qwen2")
    sharded = make_tiny_model(tmp_path / "b", "qwen2", max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    expected, found = parameters(whole), parameters(sharded)
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    shard = next(sharded.glob("model-00002*.safetensors"))
    shard.rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"model-00002.*does not exist"):
        open_source(sharded).checkpoint()
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(ModelError, match=r"model-00002.* lacks the tensor model\."):
        open_source(sharded).checkpoint()
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../a/model.safetensors"}}))
    with pytest.raises(ModelError, match="is not a plain file name"):
        open_source(sharded).checkpoint()


def test_parameters_have_the_models_names_shapes_and_dtypes(tmp_path: Path) -> None:
    for family in FAMILIES:
        for tied in (False, True):
            path = make_tiny_model(tmp_path / f"{family}-{tied}", family, tie_word_embeddings=tied)
            with torch.device("meta"):
                model = build_model(load_config(path), "bf16", 64)
            expected = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
            found = {name: (p.shape, p.dtype) for name, p in parameters(path, "bf16").items()}
            assert found == expected
            assert found["norm.weight"][1] == torch.float32
            assert ("lm_head.weight" in found) is not tied
            assert (model.lm_head.weight is model.embed.weight) is tied


def test_f16_checkpoint_is_cast_or_read_as_it_is(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama", dtype=torch.float16)
    checkpoint = open_source(path).checkpoint()
    assert checkpoint.dtype("model.norm.weight") == "f16"
    tensor = checkpoint.tensor("model.embed_tokens.weight")
    assert isinstance(tensor, ArrayTensor)
    weight = tensor.array
    assert weight.dtype == np.float16
    assert torch.equal(parameters(path, "bf16")["embed.weight"], torch.from_numpy(weight.copy()).to(torch.bfloat16))
    assert torch.equal(parameters(path, "f16")["embed.weight"], torch.from_numpy(weight.copy()))


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of model.safetensors, `__` standing for a dot; None removes one."""
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path / "model.safetensors")


def test_the_weight_map_is_total(tiny: Path) -> None:
    rewrite(tiny, model__rotary_emb__inv_freq=torch.zeros(10))
    assert len(parameters(tiny)) == 9
    rewrite(tiny, model__extra=torch.zeros(2, 3))
    with pytest.raises(ModelError, match=r"tensor model\.extra of shape \[2, 3\], which"):
        parameters(tiny)
    rewrite(tiny, model__extra=None, model__norm__weight=torch.zeros(61))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[61\] where config\.json implies \[60\]"):
        parameters(tiny)
    rewrite(tiny, model__norm__weight=None)
    with pytest.raises(ModelError, match=r"lacks the tensor model\.norm\.weight of shape \[60\]"):
        parameters(tiny)
    rewrite(tiny, model__norm__weight=torch.zeros(60, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype I8"):
        parameters(tiny)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_file(tiny: Path, keep: int) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is (empty|truncated or corrupt).*download"):
        open_source(tiny).checkpoint()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 70]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        [],
    ],
)
def test_corrupt_header(tiny: Path, entry: Any) -> None:
    header = json.dumps({"x": entry}).encode()
    (tiny / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="truncated or corrupt"):
        open_source(tiny).checkpoint()


def test_no_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "model.pt")
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor .* nor pytorch_model\.bin"):
        open_source(tiny).checkpoint()


def test_export_has_symbolic_sizes_only(tiny: Path) -> None:
    config = replace(load_config(tiny), num_layers=24, layer_windows=(0,) * 24)
    with torch.device("meta"):
        model = build_model(config, "bf16", 64)
    tokens, samples, seqs, width = (Dim(n, min=1, max=1 << 20) for n in ("tokens", "samples", "seqs", "max_blocks"))
    bounds = Dim("bounds", min=2, max=1 << 20)
    dims: list[dict[int, Any]] = [{0: tokens}] * 3
    dims += [{0: seqs, 1: width}, {0: seqs}, {0: bounds}, {0: samples}, {0: tokens}]
    shapes = [(24,), (24,), (24,), (6, 7), (6,), (5,), (3,), (24,)]
    inputs = tuple(torch.zeros(shape, dtype=torch.int32, device="meta") for shape in shapes)
    program = torch.export.export(model, inputs, dynamic_shapes=tuple(dims), strict=False)
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    assert {str(n.target).split(".")[0] for n in nodes} == {"llmc"}
    assert len(nodes) == 24 * 8 + 4
    assert len(program.range_constraints) == 5
    (output,) = program.graph.output_node().args[0]
    assert not isinstance(output.meta["val"].shape[0], int)
    assert (output.meta["val"].shape[1], output.meta["val"].dtype) == (515, torch.float32)


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not on this machine")
def test_stories260k_golden() -> None:
    model = load_model(STORIES)
    cases = json.loads((STORIES / "golden_greedy.json").read_text())
    assert cases
    for case in cases:
        ids, logits = PagedRunner(model).greedy(case["prompt_ids"], len(case["greedy_ids"]), chunk=3)
        assert ids == case["greedy_ids"]
        for token, value in case["first_logits_top5"]:
            assert float(logits[0, token]) == pytest.approx(value, abs=1e-3)


def test_copied_checkpoint_needs_no_other_file(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / name, bare / name)
    assert PagedRunner(load_model(bare)).step([[3, 4]])[0].shape == (2, 515)
