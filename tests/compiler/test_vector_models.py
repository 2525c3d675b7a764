"""Models that give vectors: transformers' numbers on every target, and the same bits in any company."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.buckets import Bucket, BucketError
from llmc.cli import main as cli
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.notes import notes
from llmc.compiler.resolve import resolve
from llmc.models import ModelError, open_source
from llmc.models.rank_prompts import QWEN3_RERANKER, RANK_TEMPLATES
from llmc.runtime.binding import LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.request_error import RequestError

from support.compiled import compile_tiny
from support.marks import rare
from support.opencl import needs_opencl
from support.tiny_encoders import (
    SPECIAL,
    VOCAB,
    check_close,
    class_logits,
    hidden_states,
    make_encoder,
    make_remote_encoder,
    pooled,
    random_texts,
    save_tokenizer,
)
from support.tiny_models import make_tiny_model, reference_model
from support.verified import Claim, checked, verifies

LENGTHS = (1, 7, 64, 33, 2, 19)
# What families pool where a model's files do not say.
POOLINGS = {
    "bert": "first",
    "roberta": "first",
    "xlm-roberta": "first",
    "modernbert": "mean",
    "nomic_bert": "mean",
    "llama": "last",
    "mistral": "last",
    "qwen2": "last",
    "qwen3": "last",
}
CLASSIFIERS = ("bert", "roberta", "xlm-roberta", "modernbert", "llama", "mistral", "qwen2", "qwen3")
LADDER: dict[str, Any] = {"buckets": "prefill=[1,4]x[32,64]", "task": "embed"}


@pytest.fixture
def compiled(kernel_cache: Path) -> Callable[..., Path]:
    """Compiles a model beside itself and returns the artifact's path."""

    def run(model: Path, **options: Any) -> Path:
        output = model.parent / "artifact"
        compile_tiny(model, output, kernel_cache, **options).close()
        return output

    return run


def check_embeddings(
    model: Path, artifact: Path, pooling: str, *, normalised: bool = True, bound: float = 1e-4
) -> None:
    texts = random_texts(LENGTHS)
    with LLM(artifact) as llm:
        assert llm.task == "embed"
        found = [one.vector for one in llm.embed(texts)]
        alone = [llm.embed([text])[0].vector for text in texts]
        stats = llm.stats()
    for text, vector in zip(texts, found, strict=True):
        wanted = pooled(hidden_states(model, text), pooling, normalised=normalised)
        check_close(vector, wanted, f"{len(text)} tokens", bound)
    for text, vector, by_itself in zip(texts, found, alone, strict=True):
        assert np.array_equal(vector.view(np.int32), by_itself.view(np.int32)), f"{len(text)} tokens in company"
    assert stats.num_finished == 2 * len(texts)
    assert stats.num_bucket_misses == 0
    checked(artifact)


@verifies(lambda: [Claim("bert", "embed")])
def test_bert_as_sentence_transformers_has_it(embedder: tuple[Path, Path]) -> None:
    check_embeddings(*embedder, "mean")


@verifies(lambda family: [Claim(family, "embed")])
@pytest.mark.parametrize(
    ("family", "pooling", "overrides"),
    [
        ("modernbert", "mean", {}),
        rare("qwen3", "last", {}),
        rare("xlm-roberta", "first", {}),
        rare("nomic_bert", "mean", {}),
        rare("qwen2", "last", {"is_causal": False}),
        rare("roberta", "first", {}),
        rare("llama", "last", {}),
        rare("mistral", "last", {}),
    ],
)
def test_families(
    family: str, pooling: str, overrides: dict[str, Any], compiled: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_encoder(tmp_path / "model", family, **overrides)
    check_embeddings(model, compiled(model, **LADDER), pooling)


@verifies(lambda family: [Claim(family, "embed", target="reference")])
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", POOLINGS)
def test_on_the_reference_target(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", family)
    options = {**LADDER, "buckets": "prefill=2x64", "target": "reference"}
    check_embeddings(model, compiled(model, **options), POOLINGS[family])


@needs_opencl
@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", *(rare(family) for family in POOLINGS if family != "bert")])
def test_on_opencl(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", family)
    check_embeddings(model, compiled(model, **LADDER | {"target": "opencl"}), POOLINGS[family])


@needs_opencl
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_on_opencl(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    options = {"buckets": "prefill=2x64", "target": "opencl"}
    one, three = (make_encoder(tmp_path / str(labels) / "model", family, labels=labels) for labels in (1, 3))
    check_scores(one, compiled(one, **options), typed=family == "bert")
    check_labels(three, compiled(three, **options))


@verifies(lambda family, dtype: [Claim(family, "embed", dtype=dtype)])
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 3e-2), ("f16", 5e-3)])
@pytest.mark.parametrize("family", POOLINGS)
def test_in_16_bits(family: str, dtype: str, bound: float, compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", family)
    check_embeddings(model, compiled(model, **LADDER, dtype=dtype), POOLINGS[family], bound=bound)


@verifies(lambda: [Claim("nomic_bert", "embed")])
@pytest.mark.parametrize("factor", [None, rare(2.0)])
def test_nomic_as_its_authors_have_it(factor: float | None, compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Names, fields and, with a factor, frequencies of the longest text."""
    model = make_remote_encoder(tmp_path / "model", "NomicBertModel", rotary_scaling_factor=factor)
    artifact = compiled(model, **LADDER)
    if factor is None:
        return check_embeddings(model, artifact, "mean")
    (text,) = random_texts((64,))
    with LLM(artifact) as llm:
        found = llm.embed([text])[0].vector
    check_close(found, pooled(hidden_states(model, text), "mean", normalised=True))
    checked(artifact)
    return None


@pytest.mark.exhaustive
def test_long_texts_see_both_ways_across_partitions(compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Windows and contexts that end in other partitions of attention than they begin in, split over threads or not."""
    model = make_encoder(
        tmp_path / "model", "modernbert", num_hidden_layers=2, max_position_embeddings=1400, local_attention=600
    )
    artifact = compiled(model, buckets="prefill=1x1400", task="embed")
    (text,) = random_texts((1390,))
    with LLM(artifact, num_threads=2) as llm:
        found = llm.embed([text])[0].vector
    check_close(found, pooled(hidden_states(model, text), "mean", normalised=True))


def test_a_causal_model_reads_long_prompts_in_chunks(compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "qwen3")
    artifact = compiled(model, buckets="prefill=[1,2]x16", max_model_len=96, task="embed")
    texts = random_texts((96, 17, 16, 33))
    texts.append(texts[0][:80] + texts[1][:9])
    with LLM(artifact) as llm:
        found = [one.vector for one in llm.embed(texts)]
        again = [llm.embed([text])[0].vector for text in texts]
        assert llm.stats().prefix_hit_tokens > 0
        assert llm.stats().num_bucket_misses == 0
    for text, vector, other in zip(texts, found, again, strict=True):
        check_close(vector, pooled(hidden_states(model, text), "last", normalised=True))
        assert np.array_equal(vector.view(np.int32), other.view(np.int32))


def test_dimensions_and_limits(embedder: tuple[Path, Path]) -> None:
    _, artifact = embedder
    (text,) = random_texts((9,))
    with LLM(artifact) as llm:
        whole, short = llm.embed([text])[0].vector, llm.embed([text], dimensions=16)[0].vector
        assert short.shape == (16,)
        np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), rtol=1e-6)
        with pytest.raises(RequestError, match="dimensions is 61: use 1 to 60"):
            llm.embed([text], dimensions=61)
        with pytest.raises(RequestError, match="prompt 1 has 65 tokens and max-model-len is 64"):
            llm.embed([text, [7] * 65])
        with pytest.raises(RequestError, match=f"token id {VOCAB}: use whole numbers"):
            llm.embed([[VOCAB]])
        with pytest.raises(RequestError, match="gives embeddings: compile one with --task generate"):
            llm.generate([text])
        with pytest.raises(RequestError, match="gives embeddings: compile one with --task rank"):
            llm.score("w1", ["w2"])
        with pytest.raises(LlmcError, match="gives vectors and writes no text"):
            llm.engine.submit(text)
        with pytest.raises(LlmcError, match="vector_capacity is 59"):
            llm.engine.submit(text, vector=np.zeros(59, np.float32))
        assert llm.embed("w1 w2 w1")[0].prompt_token_ids[-1] == 3
        assert len(llm.embed("w1 " * 99, truncate=True)[0].prompt_token_ids) == 64
        llm.engine.check_integrity()


def test_labels_without_names_of_their_own(tmp_path: Path) -> None:
    """Scores are given by label."""
    model = make_encoder(tmp_path / "model", "bert", labels=3)
    config = json.loads((model / "config.json").read_text())
    for names, said in (
        ({"0": "good", "1": "bad", "2": "good"}, "has the name 'good' twice"),
        ({}, "names of 0, 1, …"),
    ):
        (model / "config.json").write_text(json.dumps({**config, "id2label": names}))
        with pytest.raises(ModelError, match=f"'id2label' .*{said}"):
            open_source(model).config()


def test_what_cannot_be_compiled(compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    with pytest.raises(ModelError, match="writes no text; compile it with --task embed"):
        compiled(model, task="generate")
    with pytest.raises(ModelError, match="needs a checkpoint of BertForSequenceClassification"):
        compiled(model, task="rank")
    with pytest.raises(CompileError, match="which this model reads in one step"):
        compiled(model, buckets="prefill=1x32", max_model_len=64)
    (model / "modules.json").write_text('[{"type": "sentence_transformers.models.WeightedLayerPooling"}]')
    with pytest.raises(ModelError, match="has a module 'WeightedLayerPooling', which llmc does not know"):
        compiled(model)


@verifies(lambda: [Claim("bert", "rank")])
def test_rank(ranker: tuple[Path, Path]) -> None:
    check_scores(*ranker, typed=True)


@verifies(lambda family: [Claim(family, "rank")])
@pytest.mark.parametrize("family", list(map(rare, ("xlm-roberta", "modernbert", "llama", "mistral", "qwen2", "qwen3"))))
def test_rank_of_others(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", family, labels=1)
    check_scores(model, compiled(model, buckets="prefill=2x64"), typed=False)


def check_scores(model: Path, artifact: Path, *, typed: bool) -> None:
    query, documents = "w1 w2 w3", ["w4 w5", "w6 w7 w8 w9", "w1"]
    with LLM(artifact) as llm:
        assert llm.task == "rank"
        found = llm.score(query, documents)
        cut = llm.score(query, ["w5 " * 99], truncate=True)[0]
    assert len(cut.prompt_token_ids) == 64
    for one, document in zip(found, documents, strict=True):
        first, second = ([int(word[1:]) + 6 for word in text.split()] for text in (query, document))
        ids, kinds = [2, *first, 3, *second, 3], [0] * (len(first) + 2) + [1] * (len(second) + 1)
        (logit,) = class_logits(model, ids, kinds if typed else None)
        assert one.score == pytest.approx(1 / (1 + np.exp(-float(logit))), rel=1e-4)
        assert [token % VOCAB for token in one.prompt_token_ids] == ids
    checked(artifact)


@pytest.mark.parametrize(
    "file",
    ["README.md", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/reranker.jinja"],
)
def test_a_classifier_has_the_prompt_that_its_files_show(file: str, tmp_path: Path) -> None:
    """A reward model or a ranker of another prompt has Qwen3's architecture, too."""
    model = make_encoder(tmp_path / "model", "qwen3", labels=1)

    def template(rank_prompt: str = "auto") -> str | None:
        task = open_source(model, rank_prompt=rank_prompt).config().task
        assert task is not None
        assert (task.name, task.activation) == ("rank", "sigmoid")
        return task.template

    def note() -> str:
        config = CompileConfig(model=model, output=tmp_path / "out")
        (said,) = notes(resolve(config), config.open_source().checkpoint())
        return said

    prompt = RANK_TEMPLATES[QWEN3_RERANKER]
    assert template() is None
    assert template(QWEN3_RERANKER) == prompt
    assert "the tokenizer's own pair; --rank-prompt qwen3-reranker puts them into that prompt" in note()
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text(json.dumps({"chat_template": prompt.partition("{")[0]}))
    assert template() == prompt
    assert template("none") is None
    assert "in the prompt of qwen3-reranker; --rank-prompt none leaves it out" in note()


def test_prompts_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_encoder(tmp_path / "model", "qwen3", labels=3)
    words = ["compile", str(model), "-o", str(tmp_path / "out")]
    assert cli.main([*words, "--rank-prompt", "none"]) == 1
    said = "--rank-prompt none is for pairs of texts, and this model is compiled to classify; leave it out, or give"
    assert said in " ".join(capsys.readouterr().err.split())
    assert cli.main([*words, "--rank-prompt", "bert"]) == 2
    assert "'bert' is unknown: use auto, none, qwen3-reranker" in " ".join(capsys.readouterr().err.split())


@verifies(lambda: [Claim("qwen3", "rank")])
@pytest.mark.exhaustive
def test_rank_by_two_tokens_of_a_model_that_writes_text(compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    save_tokenizer(model)
    artifact = compiled(model, buckets="prefill=2x64", task="rank")
    with LLM(artifact) as llm:
        (found,) = llm.score("w1 w2", "w7 w9", instruction="w5")
        (other,) = llm.score("w1 w2", "w7 w9")
        assert len(llm.score("w1", "w2 " * 99, truncate=True)[0].prompt_token_ids) == 64
        with pytest.raises(RequestError, match=r"prompt 0 has \d+ tokens and max-model-len is 64"):
            llm.score("w1", "w2 " * 99)
    assert found.prompt_token_ids != other.prompt_token_ids
    with torch.no_grad():
        logits = reference_model(model)(torch.tensor([found.prompt_token_ids])).logits[0, -1].double()
    no, yes = (SPECIAL.index(word) for word in ("no", "yes"))
    assert found.score == pytest.approx(float(torch.softmax(logits[[no, yes]], 0)[1]), rel=1e-4)
    checked(artifact)


@verifies(lambda family: [Claim(family, "classify")])
@pytest.mark.parametrize("family", ["llama", *(rare(family) for family in CLASSIFIERS if family != "llama")])
def test_classify(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", family, labels=3)
    check_labels(model, compiled(model, buckets="prefill=2x64"))


def test_padding_that_the_tokenizer_appends_is_not_read(compiled: Callable[..., Path], tmp_path: Path) -> None:
    """As by transformers, whose classifiers take the last row that is of another token."""
    pad = SPECIAL.index("[SEP]")
    model = make_encoder(tmp_path / "model", "qwen3", labels=3, pad_token_id=pad)
    with LLM(compiled(model, buckets="prefill=2x64")) as llm:
        texts: list[Any] = ["w1 w2 w3", "", [9, pad, 8, pad, pad], [pad, pad], [pad]]
        found = [llm.classify([text])[0] for text in texts]
        assert list(found[0].prompt_token_ids) == [2, 7, 8, 9]
    for text, one in zip(texts, found, strict=True):
        ids = [2, *(int(word[1:]) + 6 for word in text.split()), pad] if isinstance(text, str) else text
        logits = class_logits(model, ids)
        wanted = np.exp(logits - logits.max())
        check_close(np.array(list(one.scores.values())), wanted / wanted.sum())


@verifies(lambda family: [Claim(family, task, target="reference") for task in ("rank", "classify")])
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_on_the_reference_target(family: str, compiled: Callable[..., Path], tmp_path: Path) -> None:
    options = {"buckets": "prefill=2x64", "target": "reference"}
    one, three = (make_encoder(tmp_path / str(labels) / "model", family, labels=labels) for labels in (1, 3))
    check_scores(one, compiled(one, **options), typed=family == "bert")
    check_labels(three, compiled(three, **options))


def check_labels(model: Path, artifact: Path) -> None:
    texts = random_texts((5, 20))
    with LLM(artifact) as llm:
        assert llm.task == "classify"
        found = llm.classify(texts)
    for text, one in zip(texts, found, strict=True):
        logits = class_logits(model, text)
        wanted = np.exp(logits - logits.max())
        wanted /= wanted.sum()
        assert list(one.scores) == ["LABEL_0", "LABEL_1", "LABEL_2"]
        check_close(np.array(list(one.scores.values())), wanted)
        assert one.label == f"LABEL_{logits.argmax()}"
    checked(artifact)


def test_a_bucket_is_added_and_what_inspect_tells(
    embedder: tuple[Path, Path], kernel_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, artifact = embedder
    more = tmp_path / "more"
    add_buckets(artifact, [Bucket.parse("prefill:2x64")], more, cache_dir=kernel_cache, jobs=1)
    with pytest.raises(BucketError, match="a model that gives vectors has prefill buckets only"):
        add_buckets(artifact, [Bucket.parse("decode:1x64")], tmp_path / "other", cache_dir=kernel_cache)
    assert cli.main(["inspect", str(more)]) == 0
    said = capsys.readouterr().out
    assert "model: 2 layers, 3 KV heads of 20" in said
    assert "task embed: vectors of 60, all of a prompt in one step" in said
    assert "prefill:2x64" in said
    (text,) = random_texts((40,))
    with LLM(artifact) as one, LLM(more) as other:
        found, again = (llm.embed([text, text])[1].vector for llm in (one, other))
    assert np.array_equal(found.view(np.int32), again.view(np.int32))
