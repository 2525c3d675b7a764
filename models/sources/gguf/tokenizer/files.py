"""The tokenizer files that a Hugging Face model has, made of a GGUF file's metadata."""

from __future__ import annotations

import io
import json
from functools import cached_property
from typing import Any, BinaryIO

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.base import ModelFiles
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.tokenizer.merges import pre_tokenizer, read_merges, read_scores
from llmc.models.sources.gguf.tokenizer.vocabulary import MODEL
from llmc.models.tokenizers.byte_level import byte_level
from llmc.models.tokenizers.document import whole
from llmc.models.tokenizers.sentence_piece import Normalization, bpe
from llmc.models.tokenizers.vocabulary import Vocabulary

_TEMPLATE = "tokenizer.chat_template"
# From general.sampling to generation_config.json.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class TokenizerFiles(ModelFiles):
    """vocabulary: None where the file has no tokenizer; then there is only what says how a text ends."""

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
                return self._metadata.text(_TEMPLATE) if self._metadata.has(_TEMPLATE) else None
        return None

    @cached_property
    def _tokenizer(self) -> str:
        assert self._vocabulary is not None
        vocabulary, metadata = self._vocabulary, self._metadata
        bos, eos = self._surrounds()
        if self._is_byte_level:
            pre, merges = pre_tokenizer(metadata), read_merges(metadata, vocabulary.ids())
            return whole(byte_level(vocabulary, pre, merges), vocabulary, bos=bos, eos=eos)
        by = Normalization(adds_space=metadata.flag("tokenizer.ggml.add_space_prefix", True))
        return whole(bpe(vocabulary, read_scores(metadata, len(vocabulary.texts)), by), vocabulary, bos=bos, eos=eos)

    @property
    def _is_byte_level(self) -> bool:
        model = self._metadata.text(MODEL)
        if model not in ("gpt2", "llama"):
            raise ModelError(
                f"{self._metadata.origin}: metadata {MODEL} is {brief(model)}, which is not one of gpt2, llama; "
                "compile with --no-tokenizer an artifact that takes token ids alone"
            )
        return model == "gpt2"

    def _surrounds(self) -> tuple[bool, bool]:
        """Whether texts begin with bos and end with eos; where the file does not say, as llama.cpp takes it."""
        bos = pre_tokenizer(self._metadata).bos if self._is_byte_level else True
        has = self._metadata.flag
        return has("tokenizer.ggml.add_bos_token", bos), has("tokenizer.ggml.add_eos_token", False)

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
        """Templates for tools and the like, beside the one of every chat."""
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
