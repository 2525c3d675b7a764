"""ONNX graphs compiled and run: logits, tokens and vectors are those of onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from bench.onnx_bytes import POSITIONS, small_decoder
from llmc import LLM, SamplingParams
from llmc.models import ModelError, open_source
from llmc.models.pooled import Pooled

from support.compiled import check_every_bucket, compile_tiny, random_tokens
from support.marks import rare
from support.onnx_blocks import quantize_products
from support.onnx_models import Runtime, export_decoder, export_encoder, save, store_weights_in
from support.parity import check_bits
from support.tiny_encoders import check_close, make_encoder, pooled, random_texts, save_sentence_files
from support.tiny_models import make_tiny_model

LADDER = "prefill=[1,2]x[16,32],decode=[1,3]x64"
GREEDY = 48
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    # Of seed 0 one token follows itself for ever.
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.4, "seed": 2}),
    "phi": ("phi", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "olmo2": ("olmo2", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "opt": ("opt", {}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 7}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "codegen": ("codegen", {"rotary_dim": 6, "num_attention_heads": 4, "hidden_size": 80, "n_inner": 100}),
    "llama3-scaling": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
}  # fmt: skip


def check_decoder(graph: Path, artifact_path: Path, cache: Path, bound: float = 1e-4) -> None:
    runtime = Runtime(graph)
    artifact = compile_tiny(graph, artifact_path, cache, buckets=LADDER, dtype="f32")
    tokens = random_tokens(artifact.info.vocab_size)
    check_every_bucket(artifact, tokens, runtime.logits(tokens), bound)
    check_bits(artifact)
    artifact.close()
    prompts = (tokens[:15], tokens[5:12])
    params = SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True)
    with LLM(artifact_path, num_threads=1) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), params)]
    assert found == [runtime.greedy(prompt, GREEDY) for prompt in prompts]
    assert len(set(found[0])) > 3


@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("gpt2", marks=pytest.mark.slow), *(rare(n) for n in DECODERS if n not in ("llama", "gpt2"))],
)
def test_decoders(name: str, kernel_cache: Path, tmp_path: Path) -> None:
    family, overrides = DECODERS[name]
    checkpoint = make_tiny_model(tmp_path / "checkpoint", family, **{"num_hidden_layers": 2, **overrides})
    graph = export_decoder(checkpoint, tmp_path / "exported" / "model.onnx", external=name == "llama")
    check_decoder(graph, tmp_path / "artifact", kernel_cache)


@pytest.mark.parametrize(
    "changes", [{}, rare({"rotary_interleaved": 1}), rare({"softcap": 2.0}), rare({"scale": 0.5, "do_rotary": 0})]
)
def test_fused_operators(changes: dict[str, Any], kernel_cache: Path, tmp_path: Path) -> None:
    """As onnxruntime-genai's builder writes decoders."""
    graph = tmp_path / "exported" / "model.onnx"
    graph.parent.mkdir()
    save(small_decoder(**changes), graph, external=True)
    (graph.parent / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    check_decoder(graph, tmp_path / "artifact", kernel_cache)


@pytest.mark.parametrize(
    ("bits", "block", "zeros", "origin"),
    [(4, 32, True, "llama"), rare(8, 64, False, "llama"), rare(4, 64, False, "qwen2"), rare(4, 32, False, "genai")],
)
def test_weights_of_integers(
    bits: int, block: int, zeros: bool, origin: str, kernel_cache: Path, tmp_path: Path
) -> None:
    """Products of MatMulNBits keep their numbers: logits are as close as with weights of floats."""
    graph = tmp_path / "exported" / "model.onnx"
    if origin == "genai":
        graph.parent.mkdir()
        model = small_decoder()
        (graph.parent / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    else:
        checkpoint = make_tiny_model(
            tmp_path / "checkpoint", origin, num_hidden_layers=2, hidden_size=64, intermediate_size=192,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        model = onnx.load(export_decoder(checkpoint, graph))
    made = quantize_products(model, bits, block, zeros=zeros)
    save(model, graph, external=True)
    source = open_source(graph)
    assert source.is_quantized
    assert source.config().dtype == "bf16"
    check_decoder(graph, tmp_path / "artifact", kernel_cache)
    weights = json.loads((tmp_path / "artifact" / "manifest.json").read_text())["weights"].values()
    kept = [weight for weight in weights if "format" in weight]
    assert sum(len(weight["sources"]) for weight in kept) == made
    assert {(weight["format"]["bits"], weight["format"]["group_size"]) for weight in kept} == {(bits, block)}


@pytest.mark.parametrize(("window", "found"), [(7, (7, 7)), (90, (90, 90)), (None, (0, 0))])
def test_windows_without_a_cache(window: int | None, found: tuple[int, ...], tmp_path: Path) -> None:
    """They are seen although they are longer than the text that the graph is first looked at with."""
    checkpoint = make_tiny_model(tmp_path / "checkpoint", "mistral", num_hidden_layers=2, sliding_window=window)
    graph = export_encoder(checkpoint, tmp_path / "exported" / "model.onnx", typed=False)
    config = open_source(graph).config()
    assert config.layer_windows == found
    assert config.pooled is not None
    assert config.pooled.pooling == "last"


@pytest.mark.parametrize("dtype", [rare(np.float16), rare(ml_dtypes.bfloat16)])
def test_weights_of_other_types(dtype: Any, kernel_cache: Path, tmp_path: Path) -> None:
    """They are what they stand for in f32, bit by bit, so logits are as close as with f32 weights."""
    checkpoint = make_tiny_model(tmp_path / "checkpoint", "qwen2", num_hidden_layers=2)
    graph = export_decoder(checkpoint, tmp_path / "exported" / "model.onnx")
    store_weights_in(graph, dtype)
    assert open_source(graph).config().dtype == ("f16" if dtype is np.float16 else "bf16")
    check_decoder(graph, tmp_path / "artifact", kernel_cache)


@pytest.mark.exhaustive
def test_graphs_of_f16(kernel_cache: Path, tmp_path: Path) -> None:
    """onnxruntime rounds between operators, which llmc in f32 does not."""
    checkpoint = make_tiny_model(tmp_path / "checkpoint", "llama", num_hidden_layers=2)
    graph = export_decoder(checkpoint, tmp_path / "exported" / "model.onnx", dtype=torch.float16)
    assert open_source(graph).config().dtype == "f16"
    artifact = compile_tiny(graph, tmp_path / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    tokens = random_tokens(500)
    check_every_bucket(artifact, tokens, Runtime(graph).logits(tokens), 2e-2)


@pytest.mark.parametrize("name", [rare("llama"), rare("gpt2")])
def test_other_attention_code(name: str, kernel_cache: Path, tmp_path: Path) -> None:
    """torch's own attention is exported as other operators than the plain code of transformers."""
    family, overrides = DECODERS[name]
    checkpoint = make_tiny_model(tmp_path / "checkpoint", family, num_hidden_layers=2, **overrides)
    graph = export_decoder(checkpoint, tmp_path / "exported" / "model.onnx", code="sdpa")
    check_decoder(graph, tmp_path / "artifact", kernel_cache)


@pytest.mark.parametrize(
    ("family", "typed", "pooling"),
    [
        pytest.param("bert", True, "auto", marks=pytest.mark.slow),
        rare("xlm-roberta", False, "mean"),
        rare("roberta", False, "auto"),
        rare("modernbert", False, "mean"),
    ],
)
def test_encoders(family: str, typed: bool, pooling: str, kernel_cache: Path, tmp_path: Path) -> None:
    more = {"pad_token_id": 1, "max_position_embeddings": 98} if family == "roberta" else {}
    checkpoint = make_encoder(tmp_path / "checkpoint", family, **more)
    graph = export_encoder(checkpoint, tmp_path / "exported" / "model.onnx", typed=typed)
    compile_tiny(
        graph, tmp_path / "artifact", kernel_cache, buckets="prefill=[1,4]x[32,64]", dtype="f32", pooling=pooling
    ).close()
    texts, runtime = random_texts((1, 7, 64, 33)), Runtime(graph)
    with LLM(tmp_path / "artifact") as llm:
        assert llm.task == "embed"
        found = [one.vector for one in llm.embed(texts)]
    for text, vector in zip(texts, found, strict=True):
        wanted = pooled(runtime.run(text), "mean" if pooling == "mean" else "first", normalised=True)
        check_close(vector, wanted, f"{len(text)} tokens")


def test_layers_that_differ_in_windows_and_angles(tmp_path: Path) -> None:
    """ModernBERT's: windows on both sides, two rotary bases, and no norm before the first attention."""
    checkpoint = make_encoder(tmp_path / "checkpoint", "modernbert")
    graph = export_encoder(checkpoint, tmp_path / "exported" / "model.onnx", typed=False)
    found, wanted = open_source(graph).config(), open_source(checkpoint).config()
    for name in ("layer_windows", "rope", "local_rope", "first_norm", "bidirectional", "norm_eps", "embedding_norm"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_what_stands_behind_an_encoder(tmp_path: Path) -> None:
    graph = export_encoder(make_encoder(tmp_path / "checkpoint", "bert"), tmp_path / "exported" / "model.onnx")
    config = open_source(graph, pooling="mean").config()
    found, hidden = config.pooled, config.hidden_size
    assert found is not None
    assert found.pooling == "mean"
    decoder = tmp_path / "decoder.onnx"
    save(small_decoder(), decoder)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    with pytest.raises(ModelError, match=r"decoder\.onnx: --pooling mean is for embeddings.*compiled to generate"):
        open_source(decoder, pooling="mean").config()
    types = ("Transformer", "Pooling", "Dense")
    modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in types]
    (graph.parent / "modules.json").write_text(json.dumps(modules))
    for name, fields in (
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", {"in_features": hidden, "out_features": 8}),
    ):
        (graph.parent / name).mkdir()
        (graph.parent / name / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"modules\.json has modules Dense.*checkpoint of safetensors"):
        open_source(graph).config()


def write_sentence_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_sentence_files(folder, "mean_tokens", normalised=False)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"default_prompt_name": "query", "prompts": {"query": "query: "}})
    )


def test_files_of_sentence_transformers_above_a_graph_with_its_own_config(tmp_path: Path) -> None:
    """As E5 has them on the hub."""
    checkpoint, root = make_encoder(tmp_path / "checkpoint", "bert"), tmp_path / "exported"
    graph = export_encoder(checkpoint, root / "onnx" / "model.onnx")
    assert (graph.parent / "config.json").is_file()
    write_sentence_files(root)
    source = open_source(graph)
    assert source.config().pooled == Pooled("mean", (), False)
    assert {root / "modules.json", root / "1_Pooling" / "config.json"} <= set(source.all_files())
    assert ["puts 'query: ' before every text" in said for said in source.ignored_config()] == [True]


def test_an_output_that_is_pooled_from_another(tmp_path: Path) -> None:
    """As exporters of sentence-transformers write it; how it is pooled, modules.json says."""
    graph = export_encoder(make_encoder(tmp_path / "checkpoint", "bert"), tmp_path / "exported" / "model.onnx")
    model = onnx.load(graph)
    rows = model.graph.output[0]
    kept = onnx.helper.make_node("Identity", [rows.name], ["token_embeddings"])
    mean = onnx.helper.make_node("ReduceMean", [rows.name], ["sentence_embedding"], axes=[1], keepdims=0)
    model.graph.node.extend([kept, mean])
    del model.graph.output[:]
    for node in (mean, kept):
        model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))
    save(model, graph)
    with pytest.raises(ModelError, match=r"pools rows to its output sentence_embedding.*give --pooling, or export"):
        open_source(graph).config()
    assert open_source(graph, pooling="mean").config().pooled == Pooled("mean", (), True)
    write_sentence_files(graph.parent)
    assert open_source(graph).config().pooled == Pooled("mean", (), False)


@pytest.mark.parametrize(("labels", "task"), [pytest.param(1, "rank", marks=pytest.mark.slow), rare(3, "classify")])
def test_scores(labels: int, task: str, kernel_cache: Path, tmp_path: Path) -> None:
    checkpoint = make_encoder(tmp_path / "checkpoint", "bert", labels=labels)
    graph = export_encoder(checkpoint, tmp_path / "exported" / "model.onnx", labels=True)
    config = open_source(graph).config()
    assert config.task is not None
    assert config.task.name == task
    compile_tiny(graph, tmp_path / "artifact", kernel_cache, buckets="prefill=[1,4]x[32]", dtype="f32").close()
    runtime = Runtime(graph)
    with LLM(tmp_path / "artifact") as llm:
        if task == "classify":
            (text,) = random_texts((9,))
            logits = runtime.run(text).astype(np.float64)
            wanted = np.exp(logits) / np.exp(logits).sum()
            check_close(np.array(list(llm.classify([text])[0].scores.values())), wanted)
            return
        score = llm.score("w3 w7", ["w9 w11 w40"])[0].score
    ids = [2, 9, 13, 3, 15, 17, 46, 3]
    logit = float(runtime.run(ids, [0] * 4 + [1] * 4)[0])
    assert abs(score - 1 / (1 + np.exp(-logit))) < 1e-4
