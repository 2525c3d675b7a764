"""What stands behind an encoder: pooling that is asked for, layers of sentence-transformers, and Jina's own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli import main as cli
from llmc.compiler.config import CompileConfig
from llmc.compiler.resolve import resolve
from llmc.models import ModelError, open_source
from llmc.runtime.llm import LLM

from support.compiled import compile_tiny
from support.failing import edit_config
from support.marks import rare
from support.new_family import targets_here
from support.tiny_encoders import (
    DenseModule,
    check_close,
    class_logits,
    hidden_states,
    make_encoder,
    make_remote_encoder,
    pooled,
    random_texts,
    save_sentence_files,
)
from support.verified import Claim, checked, on_targets, verifies

LADDER = "prefill=[2]x[64]"
JINA = "XLMRobertaForSequenceClassification"
TWO = (DenseModule(60, 40, "tanh"), DenseModule(40, 24, "identity", bias=False))


def vectors_of(model: Path, cache: Path, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    output = model.parent / f"artifact-{len(options)}"
    compile_tiny(model, output, cache, buckets=LADDER, **options).close()
    with LLM(output) as llm:
        found = [one.vector for one in llm.embed(texts)]
        alone = llm.embed([texts[0]])[0].vector
    assert np.array_equal(found[0].view(np.int32), alone.view(np.int32))
    return found


@pytest.mark.parametrize(
    ("dense", "normalised", "dtype"),
    [
        (TWO, True, "f32"),
        rare((DenseModule(60, 60, "gelu"),), False, "f32"),
        rare(TWO, True, "bf16"),
    ],
)
def test_linear_layers_behind_the_pooling(
    dense: tuple[DenseModule, ...], normalised: bool, dtype: str, tmp_path: Path, kernel_cache: Path
) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    save_sentence_files(model, "mean_tokens", normalised=normalised, dense=dense)
    texts = random_texts((5, 64, 1))
    for text, found in zip(texts, vectors_of(model, kernel_cache, texts, dtype=dtype), strict=True):
        vector = pooled(hidden_states(model, text), "mean", normalised=False)
        for module in dense:
            vector = module.applied(vector)
        wanted = vector / np.linalg.norm(vector) if normalised else vector
        assert found.shape == (dense[-1].size,)
        check_close(found, wanted, f"{len(text)} tokens", 1e-4 if dtype == "f32" else 3e-2)


def test_texts_are_as_long_as_sentence_transformers_reads(tmp_path: Path) -> None:
    """Unless a length or buckets are asked for."""
    model = make_encoder(tmp_path / "model", "bert")
    save_sentence_files(model, "mean_tokens", normalised=True)

    def longest(**asked: Any) -> int:
        return resolve(CompileConfig(model, tmp_path / "artifact", **asked)).max_model_len

    own = longest()
    settings = model / "sentence_bert_config.json"
    settings.write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    assert own == longest(max_model_len=own) > longest() == 48
    assert longest(buckets="prefill=1x64") == 64
    settings.write_text(json.dumps({"max_seq_length": None}))
    assert longest() == own
    settings.write_text(json.dumps({"max_seq_length": 0}))
    with pytest.raises(ModelError, match=r"sentence_bert_config.json: field 'max_seq_length' is 0 where"):
        longest()
    # From version 6 on, the tokenizer says it.
    settings.write_text(json.dumps({"transformer_task": "feature-extraction"}))
    tokenizer = model / "tokenizer_config.json"
    for length, wanted in ((40, 40), (own + 1, own), (10**30, own), (1e30, own), ("40", own), (None, own)):
        tokenizer.write_text(json.dumps({"model_max_length": length}))
        assert longest() == wanted
    settings.write_text(json.dumps({"max_seq_length": 48}))
    tokenizer.write_text(json.dumps({"model_max_length": 40}))
    assert longest() == 48


@pytest.mark.parametrize(
    ("own_file", "of_config", "activation"),
    [
        ({}, {}, "sigmoid"),
        ({"activation_fn": "torch.nn.modules.linear.Identity"}, {}, None),
        ({"activation_fn": "torch.nn.modules.activation.Sigmoid"}, {"activation_fn": "x.Identity"}, "sigmoid"),
        ({"activation_fn": None}, {"activation_fn": "torch.nn.modules.linear.Identity"}, None),
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, {}, "refused"),
    ],
)
def test_the_activation_of_scores_is_what_sentence_transformers_takes(
    own_file: dict[str, Any], of_config: dict[str, Any], activation: str | None, tmp_path: Path
) -> None:
    """Newer versions write it beside config.json, older ones in it."""
    model = make_encoder(tmp_path / "model", "bert", labels=1)
    (model / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder", **own_file}))
    (model / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.base.Transformer", "path": ""}]))
    edit_config(model, sentence_transformers=of_config)
    if activation == "refused":
        with pytest.raises(ModelError, match="the activation of scores 'Tanh' is not Sigmoid or Identity"):
            open_source(model).config()
        return
    task = open_source(model).config().task
    assert task is not None
    assert (task.name, task.activation) == ("rank", activation)


def test_what_sentence_transformers_does_to_texts_is_said(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    save_sentence_files(model, "mean_tokens", normalised=True)
    prompts: dict[str, Any] = {"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"}
    names = ("config_sentence_transformers.json", "sentence_bert_config.json")
    for content, said in (
        ((prompts, {}), "puts 'query: ' before every text"),
        ((prompts | {"default_prompt_name": None}, {"do_lower_case": True}), "turns texts into lower case"),
        ((prompts | {"default_prompt_name": "none"}, {"do_lower_case": False}), ""),
    ):
        for name, settings in zip(names, content, strict=True):
            (model / name).write_text(json.dumps(settings))
        warnings = resolve(CompileConfig(model, tmp_path / "artifact")).warnings()
        assert [said in warning for warning in warnings] == ([True] if said else [])


@pytest.mark.parametrize(("pooling", "kind"), [("mean", "mean"), rare("cls", "first"), rare("last", "last")])
def test_another_pooling(pooling: str, kind: str, tmp_path: Path, kernel_cache: Path) -> None:
    """It is recorded, and wins over what the model's files say, whose other modules stay."""
    model = make_encoder(tmp_path / "model", "bert")
    save_sentence_files(model, "cls_token" if pooling == "mean" else "mean_tokens", normalised=True, dense=TWO[:1])
    texts = random_texts((7, 33))
    for text, found in zip(texts, vectors_of(model, kernel_cache, texts, pooling=pooling), strict=True):
        vector = TWO[0].applied(pooled(hidden_states(model, text), kind, normalised=False))
        check_close(found, vector / np.linalg.norm(vector))
    manifest = json.loads((tmp_path / "artifact-1" / "manifest.json").read_text())
    assert manifest["model"]["pooled"]["pooling"] == kind


@pytest.mark.exhaustive
def test_a_causal_model_may_give_the_mean(tmp_path: Path, kernel_cache: Path) -> None:
    model = make_encoder(tmp_path / "model", "qwen3")
    texts = random_texts((7, 33))
    found = vectors_of(model, kernel_cache, texts, pooling="mean", task="embed")
    for text, vector in zip(texts, found, strict=True):
        check_close(vector, pooled(hidden_states(model, text), "mean", normalised=True))


def test_a_pooling_that_has_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranker = make_encoder(tmp_path / "ranker", "bert", labels=1)
    with pytest.raises(ModelError, match="--pooling mean is for embeddings, and this model is compiled to rank"):
        open_source(ranker, pooling="mean").config()
    writer = make_encoder(tmp_path / "writer", "qwen3")
    with pytest.raises(ModelError, match="--pooling cls is for embeddings, and this model is compiled to generate"):
        open_source(writer, pooling="cls").config()
    assert cli.main(["compile", str(writer), "-o", str(tmp_path / "out"), "--pooling", "max"]) == 2
    assert "--pooling 'max' is unknown: use auto, mean, cls, last" in capsys.readouterr().err


def spoil_config(change: dict[str, Any]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        file = model / "2_Dense" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    return spoil


def spoil_modules(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        modules = json.loads((model / "modules.json").read_text())
        change(modules)
        (model / "modules.json").write_text(json.dumps(modules))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_config({"in_features": 61}), "in_features is 61, but 60 numbers come there"),
        (spoil_config({"activation_function": "torch.nn.modules.activation.Mish"}), "Mish' is not supported; one of"),
        (spoil_config({"out_features": 41}), r"2_Dense.linear.weight has shape \[40, 60\]"),
        (lambda model: (model / "2_Dense" / "model.safetensors").unlink(), "2_Dense holds neither model.safetensors"),
        (spoil_modules(lambda modules: modules[2].update(path="../2_Dense")), "has a module in '../2_Dense', which is"),
        (spoil_modules(lambda modules: modules.reverse()), "has a module 'Dense' out of order"),
    ],
)
def test_what_is_wrong_with_a_layer(spoil: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    from llmc.models.loader import check_checkpoint

    model = make_encoder(tmp_path / "model", "bert")
    save_sentence_files(model, "mean_tokens", normalised=True, dense=TWO[:1])
    spoil(model)
    source = open_source(model)
    with pytest.raises(ModelError, match=sentence):
        check_checkpoint(source.config(), source.checkpoint())


@verifies(lambda: on_targets(Claim("xlm-roberta", "rank")))
def test_jinas_reranker(tmp_path: Path, kernel_cache: Path) -> None:
    """Its config.json names no model_type, its tensors are called as flash-attention's modules."""
    model = make_remote_encoder(tmp_path / "model", JINA)
    assert "model_type" not in json.loads((model / "config.json").read_text())
    for target in targets_here():
        output = tmp_path / target
        compile_tiny(model, output, kernel_cache, buckets=LADDER, target=target).close()
        with LLM(output) as llm:
            assert llm.task == "rank"
            found = llm.score("w1 w2 w3", ["w4 w5", "w6"])
        for one in found:
            (logit,) = class_logits(model, list(one.prompt_token_ids))
            assert one.score == pytest.approx(1 / (1 + np.exp(-float(logit))), rel=1e-4)
        checked(output)


def test_another_class_of_the_hub_is_refused_as_before(tmp_path: Path) -> None:
    model = make_remote_encoder(tmp_path / "model", JINA, auto_map={"AutoConfig": "configuration_other.Other"})
    with pytest.raises(ModelError, match="lacks the field 'model_type'"):
        open_source(model).config()
    named = {"AutoConfig": "jinaai/xlm-roberta-flash--configuration_xlm_roberta.XLMRobertaFlashConfig"}
    elsewhere = make_remote_encoder(tmp_path / "elsewhere", JINA, auto_map=named)
    assert open_source(elsewhere).config().model_type == "xlm-roberta"
