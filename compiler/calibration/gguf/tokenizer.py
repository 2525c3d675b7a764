"""A model's tokenizer as GGUF metadata, as llama.cpp's converter derives it from tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llmc.compiler.config import CompileError
from llmc.manifest import MAX_COPIED_BYTES
from llmc.models.config import ModelConfig
from llmc.models.sources.base import ModelFiles
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmc.models.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_OTHERWISE = "use --format compressed-tensors"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "▁"
_CUTS = (
    "It's we'LL I'D  two  spaces \n\n\t\n 1234567 3.14159 naïve café ÀÉÎ a\u0301 日本語のテキスト 한국어 Привет שלום "
    "٣٤٥ 👩‍👩‍👧 def f(x):\n    return x  # ok\r\n\tpass\r\nCamelCaseWords HTTPServer !!!???... --- $$ <=> ~|^ "
    "\u00a0wide\u3000 ﬁ ™ ½ 中文字符，测试。 x_y `code` /* a */ tail  "
)
"""A text that pre-tokenizers split differently; like llama.cpp's converter, llmc identifies them by the result."""


def add_tokenizer(writer: Any, files: ModelFiles, model: ModelConfig) -> None:
    """Adds the tokenizer, if the model has a tokenizer.json. Raises CompileError if GGUF cannot express it."""
    from tokenizers import Tokenizer

    text = _read(files, "tokenizer.json")
    if text is None:
        writer.add_tokenizer_model("none")
        return
    try:
        document, tokenizer = json.loads(text), Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        why = " ".join(str(error).split())[:200]
        raise CompileError(f"{files.place('tokenizer.json')} is not a tokenizer ({why}); download it again") from None
    settings = json.loads(_read(files, "tokenizer_config.json") or "{}")
    if document["model"].get("type") != "BPE":
        raise CompileError(f"{files.place('tokenizer.json')} is not BPE, which --format gguf needs; {_OTHERWISE}")
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in document["model"]["merges"]]
    tokens = _tokens(document, model.vocab_size)
    if _is_byte_level(document):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre(tokenizer, document, files))
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
        writer.add_token_merges([" ".join(merge) for merge in merges])
    elif document["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_scores(_scores([token for token, _ in tokens], merges))
        writer.add_token_types([_piece_kind(document, token, kind) for token, kind in tokens])
        writer.add_add_space_prefix(tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a")
    else:
        raise CompileError(
            f"{files.place('tokenizer.json')} is of neither GPT-2's nor SentencePiece's kind of BPE, which --format "
            f"gguf needs; {_OTHERWISE}"
        )
    _add_special(writer, tokenizer, settings, model)
    template = _read(files, "chat_template.jinja") or settings.get("chat_template")
    if template:
        writer.add_chat_template(template)


def _read(files: ModelFiles, name: str) -> str | None:
    if not files.has(name):
        return None
    with files.open(name) as file:
        return file.read(MAX_COPIED_BYTES).decode("utf-8")


def _parts(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [part for each in step[inner] for part in _parts(each, inner)] if step["type"] == "Sequence" else [step]


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    cuts = _parts(document.get("pre_tokenizer"), "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in cuts)


def _tokens(document: Mapping[str, Any], count: int) -> list[tuple[str, int]]:
    """(text, kind) by id; unused ids are filled up to the rows of the embedding."""
    found = {token: (text, NORMAL) for text, token in document["model"]["vocab"].items()}
    for token in document["added_tokens"]:
        found[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if max(found) >= count:
        raise CompileError(
            f"the tokenizer has the token {max(found)}, but the model has {count}; take the tokenizer of this model"
        )
    return [found.get(token, (f"[PAD{token}]", UNUSED)) for token in range(count)]


def _piece_kind(document: Mapping[str, Any], text: str, kind: int) -> int:
    if text == document["model"].get("unk_token"):
        return UNKNOWN
    return BYTE if kind == NORMAL and _BYTE.fullmatch(text) else kind


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Scores by merge rank: the earliest merge scores best; a token that no merge makes scores lowest."""
    place: dict[str, int] = {}
    for merge in merges:
        place.setdefault("".join(merge), len(place))
    return [-float(place.get(token, len(place))) for token in tokens]


def _pre(tokenizer: Any, document: Mapping[str, Any], files: ModelFiles) -> str:
    """GGUF's name for the pre-tokenizer that splits text as this tokenizer does."""
    expected = _cut(tokenizer.normalizer, tokenizer.pre_tokenizer)
    ignores = bool(document["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if known.ignore_merges == ignores and _cut(*_steps(known)) == expected:
            return name
    raise CompileError(
        f"{files.place('tokenizer.json')} cuts texts as none of GGUF's pre-tokenizers that llmc knows; {_OTHERWISE}"
    )


def _steps(known: PreTokenizer) -> tuple[Any, Any]:
    from tokenizers import Regex, normalizers, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in known.expressions]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC() if known.nfc else None, pre_tokenizers.Sequence([*cuts, level])


def _cut(normalizer: Any, pre_tokenizer: Any) -> list[str]:
    text = normalizer.normalize_str(_CUTS) if normalizer is not None else _CUTS
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _add_special(writer: Any, tokenizer: Any, settings: Mapping[str, Any], model: ModelConfig) -> None:
    """Adds special tokens by role. Of several end tokens, those after the first also end turns."""

    def named(name: str) -> int | None:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return tokenizer.token_to_id(text) if isinstance(text, str) else None

    bos, eos = named("bos_token"), named("eos_token")
    bos = model.bos_token_id if bos is None else bos
    ends = list(dict.fromkeys([*(() if eos is None else (eos,)), *model.eos_token_ids]))
    roles = {"bos": bos, "unk": named("unk_token"), "pad": named("pad_token")}
    roles |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    for role, token in roles.items():
        if token is not None:
            getattr(writer, f"add_{role}_token_id")(token)
    around = tokenizer.encode("").ids
    writer.add_add_bos_token(bos is not None and around[:1] == [bos])
    writer.add_add_eos_token(bool(ends) and around[-1:] == ends[:1] and around != [bos])
