"""Makes tokenizer.json for a directory without one, from the tokenizer files that it has; and its chat templates."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file, read_file
from llmc.models.sources.base import FolderFiles
from llmc.models.sources.byte_pair_files import BYTE_PAIR_FILES, INSTEAD, VOCABULARY, byte_pair_tokenizer
from llmc.models.tokenizers.byte_level import byte_level
from llmc.models.tokenizers.document import whole
from llmc.models.tokenizers.sentence_piece import bpe, unigram
from llmc.models.tokenizers.spm_file import read_spm
from llmc.models.tokenizers.tiktoken_file import (
    ENCODINGS,
    is_tiktoken,
    read_ranks,
    tiktoken_merges,
    tiktoken_vocabulary,
)
from llmc.models.tokenizers.vocabulary import CONTROL, UNUSED, USER_DEFINED, Vocabulary
from llmc.regular_file import decoded

_MADE, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_OF_PROCESSORS = "chat_template.json"
"""Where processors of images and sounds had their template before it had a file of its own."""
_OF_TEMPLATES = (_SETTINGS, _TEMPLATE, _OF_PROCESSORS)
_ADDED = "added_tokens.json"
_NAMES = ("tokenizer.model", "qwen.tiktoken", "tiktoken.model")
TOKENIZER_SOURCES = (*_NAMES, _ADDED, _OF_PROCESSORS)
"""Files from which tokenizer.json and chat_template.jinja may be made."""
NAMED_TEMPLATES = "additional_chat_templates"
NAMED_TEMPLATE_FILES = f"{NAMED_TEMPLATES}/*.jinja"
"""The folder of chat templates with names of their own, NAME.jinja."""
_MAX_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 1 << 24


@dataclass(frozen=True)
class _Pieces:
    """Facts in a tokenizer's own code, besides SentencePiece's file.

    bos: whether texts begin with that token by default. special: control tokens after the pieces. unseen: those of them
    that are ordinary words in texts. prefix: tokens that begin every text.
    """

    bos: bool = True
    special: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


_CHATGLM = (
    "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
_PLAIN = (
    "", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizer",
    "GemmaTokenizerFast", "BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "InternLM2TokenizerFast",
    "InternLM3Tokenizer",
)  # fmt: skip
_SENTENCE_PIECE = {
    **dict.fromkeys(_PLAIN, _Pieces()),
    "YiTokenizer": _Pieces(bos=False),
    "OrionTokenizer": _Pieces(bos=False),
    "ChatGLMTokenizer": _Pieces(bos=False, special=_CHATGLM, unseen=("sop", "eop"), prefix=("[gMASK]", "sop")),
}


class TokenizerFolderFiles(FolderFiles):
    """Files of a directory; without a tokenizer.json, one is made from SentencePiece's, tiktoken's or GPT-2's files.
    Without a chat_template.jinja, it is the template in chat_template.json.

    An artifact has no folders. So where there are named templates, all templates are listed in tokenizer_config.json,
    as older checkpoints list them, and there is no file of a single template.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._of = folder

    def has(self, name: str) -> bool:
        if self._named and name in _OF_TEMPLATES:
            return name == _SETTINGS
        return super().has(name) or self._source_of(name) is not None

    def open(self, name: str) -> BinaryIO:
        if self._named and name in _OF_TEMPLATES:
            if name != _SETTINGS:
                raise FileNotFoundError(self.place(name))
            return io.BytesIO(self._with_templates.encode())
        if super().has(name) or self._source_of(name) is None:
            return super().open(name)
        return io.BytesIO((self._made if name == _MADE else self._template).encode())

    def place(self, name: str) -> str:
        source = None if super().has(name) else self._source_of(name)
        return super().place(name) if source is None else str(source)

    def _source_of(self, name: str) -> Path | None:
        """The file from which one that is missing is made, or None."""
        if name == _MADE:
            return self._source
        template = self._of / _OF_PROCESSORS
        return template if name == _TEMPLATE and has_file(template) else None

    @cached_property
    def _template(self) -> str:
        return self._json(_OF_PROCESSORS).text("chat_template")

    @cached_property
    def _named(self) -> list[Path]:
        """The files of templates with names of their own, by name."""
        return sorted((self._of / NAMED_TEMPLATES).glob("*.jinja"))

    @cached_property
    def _with_templates(self) -> str:
        """tokenizer_config.json with the templates of all files; as in transformers, these replace its own."""
        found: dict[str, str] = {}
        if super().has(_TEMPLATE):
            found["default"] = _text(self._of / _TEMPLATE)
        elif has_file(self._of / _OF_PROCESSORS):
            found["default"] = self._template
        found |= {file.stem: _text(file) for file in self._named}
        listed = [{"name": name, "template": text} for name, text in found.items()]
        return json.dumps({**self._json(_SETTINGS).values, "chat_template": listed}, ensure_ascii=False)

    @cached_property
    def _source(self) -> Path | None:
        """The file from which tokenizer.json is made, or None."""
        found = next((self._of / name for name in _NAMES if has_file(self._of / name)), None)
        has_pairs = found is None and all(has_file(self._of / name) for name in BYTE_PAIR_FILES)
        return self._of / VOCABULARY if has_pairs else found

    @cached_property
    def _made(self) -> str:
        assert self._source is not None
        if self._source.name == VOCABULARY:
            return byte_pair_tokenizer(self._of)
        try:
            data = read_file(self._source, _MAX_BYTES)
        except OSError as error:
            raise ModelError(f"{self._source} cannot be read: {error.strerror}") from None
        settings = self._json(_SETTINGS)
        name = settings.text("tokenizer_class", "")
        made = self._of_tiktoken if is_tiktoken(data) else self._of_sentence_piece
        return made(data, name, settings)

    def _json(self, name: str) -> Fields:
        path = self._of / name
        return Fields.read(path) if has_file(path) else Fields({}, str(path))

    def _unknown_class(self, name: str, known: Mapping[str, Any]) -> ModelError:
        return ModelError(
            f"{self._source} is of tokenizer_class {brief(name)}, not one of {', '.join(filter(None, known))}, "
            f"and there is no tokenizer.json: {INSTEAD}"
        )

    def _of_sentence_piece(self, data: bytes, name: str, settings: Fields) -> str:
        if name not in _SENTENCE_PIECE:
            raise self._unknown_class(name, _SENTENCE_PIECE)
        model, own = read_spm(data, str(self._source)), _SENTENCE_PIECE[name]
        pieces, kinds = model.vocabulary, (UNUSED if text in own.unseen else CONTROL for text in own.special)
        pieces = replace(pieces, texts=(*pieces.texts, *own.special), kinds=(*pieces.kinds, *kinds))
        vocabulary = self._with_added(pieces, settings)
        # Added tokens have ids below every piece.
        scores = (*model.scores, *(-1e4 for _ in vocabulary.texts[len(model.scores) :]))
        parts = (bpe if model.is_bpe else unigram)(vocabulary, scores, model.normalization)
        return self._whole(parts, vocabulary, settings, own.bos, own.prefix)

    def _of_tiktoken(self, data: bytes, name: str, settings: Fields) -> str:
        encoding = ENCODINGS.get(name)
        if encoding is None and settings.has("added_tokens_decoder") and name == "PreTrainedTokenizerFast":
            # As for Llama 3, whose tokens it lists.
            encoding = ENCODINGS[""]
        if encoding is None:
            raise self._unknown_class(name, ENCODINGS)
        origin = str(self._source)
        ranks = read_ranks(data, origin)
        vocabulary = self._with_added(tiktoken_vocabulary(ranks, encoding, origin), settings)
        parts = byte_level(vocabulary, encoding.pre, tiktoken_merges(ranks))
        return self._whole(parts, vocabulary, settings, encoding.bos is not None, encoding.prefix)

    def _whole(
        self, parts: Mapping[str, Any], vocabulary: Vocabulary, settings: Fields, begins: bool, prefix: Sequence[str]
    ) -> str:
        bos = settings.flag("add_bos_token", begins) and vocabulary.bos is not None
        eos = settings.flag("add_eos_token", False) and vocabulary.eos is not None
        # Pieces come first, and may have the same text.
        ids = {text: token for token, text in enumerate(vocabulary.texts)}
        before = tuple(ids[token] for token in prefix)
        return whole(parts, replace(vocabulary, prefix=before), bos=bos, eos=eos)

    def _with_added(self, vocabulary: Vocabulary, settings: Fields) -> Vocabulary:
        """Adds the tokens of tokenizer_config.json and added_tokens.json, and the roles from the former."""
        found: dict[int, tuple[str, bool]] = {}
        for text, token in self._json(_ADDED).values.items():
            found[_id(token, self._of / _ADDED)] = (text, False)
        listed = settings.table("added_tokens_decoder")
        for token in listed.values if listed is not None else ():
            assert listed is not None
            one = listed.table(token)
            if one is not None:
                found[_id(token, settings.origin)] = (one.text("content"), one.flag("special", False))
        texts, kinds = list(vocabulary.texts), list(vocabulary.kinds)
        for token, (text, is_special) in sorted(found.items()):
            while len(texts) <= token:
                texts.append(f"[PAD{len(texts)}]")
                kinds.append(UNUSED)
            # Listed pieces keep their kind.
            if texts[token] != text or kinds[token] == UNUSED or is_special:
                texts[token], kinds[token] = text, CONTROL if is_special else USER_DEFINED
        names = {role: _text_of(settings.raw(f"{role}_token", None)) for role in ("bos", "eos")}
        roles = {role: texts.index(name) for role, name in names.items() if name is not None and name in texts}
        return replace(
            vocabulary,
            texts=tuple(texts),
            kinds=tuple(kinds),
            bos=roles.get("bos", vocabulary.bos if names["bos"] is None else None),
            eos=roles.get("eos", vocabulary.eos if names["eos"] is None else None),
        )


def _text(file: Path) -> str:
    """The text of a template's file."""
    try:
        return decoded(read_file(file, _MAX_TEMPLATE_BYTES))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}; put a regular file there") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8 text ({error.reason}); download it again") from None


def _text_of(token: Any) -> str | None:
    """The text of a token in config files: a string, or an object that contains it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _id(token: Any, origin: object) -> int:
    """A valid token id. Raises ModelError otherwise."""
    number = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 9 else token
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 21:
        raise ModelError(f"{origin}: {brief(token)} is not a token id; download it again")
    return number
