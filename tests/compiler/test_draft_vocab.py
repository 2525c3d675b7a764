"""Heads that may guess some tokens only: which ones, and that they guess as before among these."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from llmc.compiler.beside import output_beside
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.draft_vocab import choose_tokens
from llmc.compiler.drafting_heads import compile_with_head
from llmc.models.errors import ModelError
from llmc.models.sources.base import FolderFiles
from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, replay
from support.eagle3_heads import make_eagle3
from support.eagle_heads import make_head
from support.engine_driver import random_ids
from support.families import CASES
from support.mtp_heads import add_mtp
from support.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {"buckets": "prefill=[1]x8,decode=[1]x64", "dtype": "f32", "block_size": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output projection is its embedding, and whose layer makes guesses."""
    family, fields = CASES["mimo"]
    folder = make_tiny_model(tmp_path_factory.mktemp("few") / "model", family, **fields, tie_word_embeddings=True)
    return add_mtp(folder)


def test_which_tokens_are_chosen(model: Path) -> None:
    files, config = FolderFiles(model), CompileConfig(model, model / "out").open_source().config()
    assert config.eos_token_ids == (2,)
    assert choose_tokens(files, config, 5, "") == (0, 1, 2, 3, 4)
    # Without a tokenizer no text can be counted.
    with pytest.raises(CompileError, match=r"--draft-vocab-text needs it; put the tokenizer there or leave it out"):
        choose_tokens(files, config, 5, "a text")
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", "<user>"])
    tokenizer.save(str(model / "tokenizer.json"))
    # At most one in eight is an added one.
    assert choose_tokens(files, config, 8, "") == (0, 1, 2, 3, 4, 5, 6, 500)
    assert choose_tokens(files, config, 16, "") == (*range(14), 500, 501)
    text = "w400 w300 w300 w200 w9"
    assert choose_tokens(files, config, 16, text) == (*range(11), 200, 300, 400, 500, 501)
    # Of equally frequent ones, the lower id comes first.
    assert choose_tokens(files, config, 4, text) == (2, 9, 200, 300)
    damaged: tuple[Any, ...] = [{"id": -5}, {"id": 501}], [{"id": 1e400}], [{}], 7
    for tokens in damaged:
        (model / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
        assert min(choose_tokens(files, config, 16, "")) == 0
    with pytest.raises(CompileError, match=r"--draft-vocab 515 is not a part of the model's 515 tokens"):
        choose_tokens(files, config, 515, "")
    with pytest.raises(CompileError, match=r"--draft-vocab 1 has no room beside the tokens that end a text \(1\)"):
        choose_tokens(files, config, 1, "")


def test_where_the_head_goes() -> None:
    for model, head in (("a/llama.llmc", "a/llama-mtp.llmc"), ("a/qwen3.5", "a/qwen3.5-mtp"), ("q", "q-mtp")):
        assert output_beside(Path(model), "mtp") == Path(head)


def test_nothing_is_compiled_for_a_head_that_cannot_be(model: Path, kernel_cache: Path, tmp_path: Path) -> None:
    def refused(folder: Path, output: Path, message: str, few: int = 0) -> None:
        config = CompileConfig(folder, output, cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
        with pytest.raises((CompileError, ModelError), match=message):
            compile_with_head(config, None, draft_vocab=few)

    family, fields = CASES["glm4_moe"]
    without = make_tiny_model(tmp_path / "without", family, **fields)
    refused(without, tmp_path / "a.llmc", "has no layer for multi-token prediction")
    (tmp_path / "b-mtp.llmc").write_text("a file")
    refused(model, tmp_path / "b.llmc", "exists and is not an llmc artifact")
    config = CompileConfig(model, tmp_path / "c.llmc", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
    compile_with_head(config, None, draft_vocab=50)
    shutil.rmtree(tmp_path / "c.llmc")
    refused(model, tmp_path / "c.llmc", "is an artifact of another model or other options", few=60)
    assert not any((tmp_path / f"{name}.llmc").exists() for name in "abc")


def _logits(head: Path) -> np.ndarray:
    with Artifact(head) as artifact, Replayer(artifact, num_threads=1, num_blocks=4) as replayer:
        row: np.ndarray = replay(replayer, 0, Pages(4, 16), [(0, random_ids(5, 6), 0)])[0]
    return row


@pytest.mark.native
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_logits_of_these_tokens_are_the_same(kind: str, model: Path, kernel_cache: Path, tmp_path: Path) -> None:
    """Also where the model's output projection is its embedding."""
    head = None
    if kind == "eagle":
        family, fields = CASES["llama"]
        model = make_tiny_model(tmp_path / "llama", family, **fields)
        head = make_head(tmp_path / "head", model)
    found, count = {}, 60
    for few in (0, count):
        config = CompileConfig(
            model, tmp_path / f"out{few}", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS
        )
        _, report = compile_with_head(config, head, draft_vocab=few)
        found[few] = _logits(report.artifact)
    chosen = list(choose_tokens(FolderFiles(model), config.open_source().config(), count, ""))
    np.testing.assert_array_equal(found[count][chosen], found[0][chosen])
    others = np.delete(found[count], chosen)
    assert set(others.tolist()) == {float(np.float32(-1e30))}


def test_heads_with_a_vocabulary_of_their_own(tmp_path: Path, kernel_cache: Path) -> None:
    family, fields = CASES["llama"]
    model = make_tiny_model(tmp_path / "llama", family, **fields)
    head = make_eagle3(tmp_path / "head", model, eagle_aux_hidden_state_layer_ids=(0, 1, 3))
    config = CompileConfig(model, tmp_path / "out", cache_dir=kernel_cache, tokenizer="none", **OPTIONS)
    with pytest.raises(ModelError, match=r"has a vocabulary of its own: leave out --draft-vocab"):
        compile_with_head(config, head, draft_vocab=50)
    assert not config.output.exists()


def test_a_note_where_most_of_a_guess_chooses_a_token(tmp_path: Path, kernel_cache: Path) -> None:
    family, fields = CASES["mimo"]
    model = add_mtp(make_tiny_model(tmp_path / "model", family, **{**fields, "vocab_size": 70000}))
    found = []
    for few in (0, 300):
        config = CompileConfig(
            model, tmp_path / f"out{few}", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS
        )
        found.append(compile_with_head(config, None, draft_vocab=few)[1].notes)
    assert "of the 4 million weights that a guess reads, 4 million choose among the 70000 tokens" in found[0][-1]
    assert found[1] == ()
