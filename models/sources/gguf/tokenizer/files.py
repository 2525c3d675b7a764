"""The tokenizer files of a Hugging Face model, generated from GGUF metadata."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cached_property
from typing import Any, BinaryIO

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.base import ModelFiles
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.tokenizer.merges import (
    check_line_breaks,
    pre_tokenizer,
    read_charsmap,
    read_merges,
    read_scores,
)
from llmc.models.sources.gguf.tokenizer.vocabulary import GEMMA4, MODEL, as_pieces
from llmc.models.tokenizers.byte_level import byte_level
from llmc.models.tokenizers.document import whole
from llmc.models.tokenizers.sentence_piece import Normalization, bpe, merged, unigram
from llmc.models.tokenizers.vocabulary import Vocabulary
from llmc.models.tokenizers.word_piece import word_piece

_MODELS = ("gpt2", "llama", "bert", "t5", GEMMA4)
_TEMPLATE = "tokenizer.chat_template"
# Copied from general.sampling to generation_config.json.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class TokenizerFiles(ModelFiles):
    """vocabulary: None if the file has no tokenizer; then only end tokens are written."""

    def __init__(self, metadata: Metadata, vocabulary: Vocabulary | None) -> None:
        self._metadata, self._vocabulary = metadata, vocabulary

    def has(self, name: str) -> bool:
        return self._text(name) is not None

    def open(self, name: str) -> BinaryIO:
        text = self._text(name)
        if text is None:
            raise FileNotFoundError(self.place(name))
        return io.BytesIO(text.encode())

    def place(self, name: str) -> str:
        return f"{name} of {self._metadata.origin}"

    def _text(self, name: str) -> str | None:
        if self._vocabulary is None:
            return None
        match name:
            case "tokenizer.json":
                return self._tokenizer
            case "tokenizer_config.json":
                return json.dumps(self._config(self._vocabulary), ensure_ascii=False)
            case "generation_config.json":
                return json.dumps(self._generation(self._vocabulary))
            case "chat_template.jinja":
                # Such a file would take the place of named templates, which are listed with it in the configuration.
                alone = self._metadata.has(_TEMPLATE) and not self._named_templates()
                return self._metadata.text(_TEMPLATE) if alone else None
        return None

    @cached_property
    def _tokenizer(self) -> str:
        assert self._vocabulary is not None
        vocabulary, metadata = self._vocabulary, self._metadata
        bos, eos = self._surrounds()
        match self._model:
            case "gpt2":
                pre, merges = pre_tokenizer(metadata), read_merges(metadata, vocabulary.ids())
                return whole(byte_level(vocabulary, pre, merges), vocabulary, bos=bos, eos=eos)
            case "gemma4":
                merges = read_merges(metadata, vocabulary.ids())
                check_line_breaks(metadata, vocabulary, merges)
                return whole(merged(vocabulary, merges), vocabulary, bos=bos, eos=eos)
            case "bert":
                pieces = as_pieces(vocabulary)
                return whole(word_piece(pieces), pieces, bos=bos, eos=eos, between=0)
        scores = read_scores(metadata, len(vocabulary.texts))
        has = metadata.flag
        by = Normalization(adds_space=has("tokenizer.ggml.add_space_prefix", True))
        if self._model == "llama":
            return whole(bpe(vocabulary, scores, by), vocabulary, bos=bos, eos=eos)
        removes = has("tokenizer.ggml.remove_extra_whitespaces", True)
        by = replace(by, charsmap=read_charsmap(metadata), removes_spaces=removes)
        # Like RoBERTa's pairs.
        return whole(unigram(vocabulary, scores, by), vocabulary, bos=bos, eos=eos, between=1)

    @property
    def _model(self) -> str:
        model = self._metadata.text(MODEL)
        if model not in _MODELS:
            raise ModelError(
                f"{self._metadata.origin}: metadata {MODEL} is {brief(model)}, which is not one of "
                f"{', '.join(_MODELS)}; compile with --no-tokenizer an artifact that takes token ids alone"
            )
        return model

    def _surrounds(self) -> tuple[bool, bool]:
        """(whether texts begin with bos, whether they end with eos); llama.cpp's defaults if the file does not say."""
        bos = pre_tokenizer(self._metadata).bos if self._model == "gpt2" else True
        has = self._metadata.flag
        eos = self._model in ("bert", "t5")
        if self._model == GEMMA4:
            # Some files say that there is none, which llama.cpp does not heed.
            return True, has("tokenizer.ggml.add_eos_token", eos)
        return has("tokenizer.ggml.add_bos_token", bos), has("tokenizer.ggml.add_eos_token", eos)

    def _config(self, vocabulary: Vocabulary) -> dict[str, Any]:
        bos, eos = self._surrounds()
        special = {
            "bos_token": vocabulary.bos,
            "eos_token": vocabulary.eos,
            "unk_token": vocabulary.unknown,
            "pad_token": vocabulary.padding,
        }
        named = {name: vocabulary.texts[token] for name, token in special.items() if token is not None}
        config: dict[str, Any] = {**named, "add_bos_token": bos, "add_eos_token": eos}
        others = self._named_templates()
        if others and self._metadata.has(_TEMPLATE):
            others.insert(0, {"name": "default", "template": self._metadata.text(_TEMPLATE)})
        return {**config, "chat_template": others} if others else config

    def _named_templates(self) -> list[dict[str, str]]:
        """Named templates, such as for tools, besides the default chat template."""
        found = []
        for key in self._metadata.all_keys():
            if key.startswith(f"{_TEMPLATE}."):
                found.append({"name": key.removeprefix(f"{_TEMPLATE}."), "template": self._metadata.text(key)})
        return found

    def _generation(self, vocabulary: Vocabulary) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if vocabulary.bos is not None:
            found["bos_token_id"] = vocabulary.bos
        if vocabulary.ends:
            found["eos_token_id"] = list(vocabulary.ends)
        for key, name in _SAMPLING.items():
            if self._metadata.has(f"general.sampling.{key}"):
                found[name] = self._metadata.number(f"general.sampling.{key}")
        if "top_k" in found:
            found["top_k"] = int(found["top_k"])
        return {**found, "do_sample": True} if "temperature" in found else found
