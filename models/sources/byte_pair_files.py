"""vocab.json and merges.txt, as GPT-2 published byte-level BPE, become a tokenizer.json.

Ids are those of the class of transformers that the checkpoint names, with the tokens that its other files add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file, read_file
from llmc.models.tokenizers.byte_level import byte_level
from llmc.models.tokenizers.document import whole
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from llmc.models.tokenizers.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocabulary

VOCABULARY, MERGES = "vocab.json", "merges.txt"
BYTE_PAIR_FILES = (VOCABULARY, MERGES)
_SETTINGS, _CONFIG = "tokenizer_config.json", "config.json"
_MARKS, _ADDED = "special_tokens_map.json", "added_tokens.json"
_MAX_BYTES, _MAX_ID = 64 << 20, 1 << 21
_AGAIN = "download it again"
INSTEAD = (
    "save one with transformers (AutoTokenizer.from_pretrained, then save_pretrained), or compile with --no-tokenizer "
    "an artifact that takes token ids alone"
)
_END = "<|endoftext|>"
# In transformers' order, in which tokens without an id get one.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class _Class:
    """Facts in a tokenizer's own code. pre: the name of how it splits texts. roles: tokens if the files name none."""

    pre: str
    roles: Mapping[str, str]


_GPT2 = _Class("gpt-2", dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
_QWEN2 = _Class("qwen2", dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END))
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "GPT2TokenizerFast": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "CodeGenTokenizerFast": _GPT2,
    "Qwen2Tokenizer": _QWEN2,
    "Qwen2TokenizerFast": _QWEN2,
}
_OF_MODELS = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "codegen", "phi", "starcoder2"), _GPT2),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN2),
}
"""By model_type, where no file names the class."""


@dataclass(frozen=True)
class _Added:
    """A token that is matched before a text is split, as tokenizer.json states it."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def byte_pair_tokenizer(folder: Path) -> str:
    """tokenizer.json of a directory with vocab.json and merges.txt. Raises ModelError."""
    settings = _optional(folder / _SETTINGS)
    own = _class_of(folder, settings)
    ids = _vocabulary(folder / VOCABULARY)
    pairs = _merges(folder / MERGES, ids)
    is_listed = settings.mentions("added_tokens_decoder")
    # With such a list, transformers does not read the older files.
    values = {**settings.values, **({} if is_listed else _optional(folder / _MARKS).values)}
    roles = {role: _token(values.get(role, own.roles.get(role)), settings.origin) for role in _ROLES}
    special = [*(token for token in roles.values() if token is not None), *_others(values, settings.origin)]
    by_id = _listed(settings) if is_listed else _in_older_file(_optional(folder / _ADDED), special)
    marked = {token.content for token in roles.values() if token is not None}
    added = {
        token.content: replace(token, special=token.special or token.content in marked) for token in by_id.values()
    }
    for token in special:
        added.setdefault(token.content, token)
    vocabulary = _with_added(ids, {token.content: number for number, token in by_id.items()}, added, str(folder))
    numbers = vocabulary.ids()
    found = {role: None if token is None else numbers[token.content] for role, token in roles.items()}
    vocabulary = replace(vocabulary, bos=found["bos_token"], eos=found["eos_token"])
    parts = byte_level(vocabulary, PRE_TOKENIZERS[own.pre], pairs)
    parts["added_tokens"] = sorted(
        ({"id": numbers[token.content], **asdict(token)} for token in added.values()), key=lambda one: one["id"]
    )
    if settings.flag("add_prefix_space", False):
        parts["pre_tokenizer"] = _spaced(own, settings.origin)
    return whole(
        parts,
        vocabulary,
        bos=bool(values.get("add_bos_token")) and vocabulary.bos is not None,
        eos=bool(values.get("add_eos_token")) and vocabulary.eos is not None,
    )


def _optional(path: Path) -> Fields:
    return Fields.read(path) if has_file(path) else Fields({}, str(path))


def _class_of(folder: Path, settings: Fields) -> _Class:
    """By the class that a file names, or the model's kind."""
    config = _optional(folder / _CONFIG)
    name = settings.text("tokenizer_class", config.text("tokenizer_class", ""))
    if name:
        what, known = f"tokenizer_class {brief(name)}", _CLASSES
    else:
        name = config.text("model_type", "")
        what, known = f"model_type {brief(name)}, without a tokenizer_class", _OF_MODELS
    if name not in known:
        raise ModelError(
            f"{folder / VOCABULARY} is of {what}, not one of {', '.join(known)}, and there is no tokenizer.json: "
            f"{INSTEAD}"
        )
    return known[name]


def _vocabulary(path: Path) -> dict[str, int]:
    """Ids by text: 0, 1, 2, … in any order."""
    ids = dict(Fields.read(path, _MAX_BYTES).values)
    if not ids or not all(type(number) is int for number in ids.values()) or set(ids.values()) != set(range(len(ids))):
        raise ModelError(f"{path}: the ids of its {len(ids)} tokens are not 0, 1, 2, …; {_AGAIN}")
    return ids


def _merges(path: Path, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in merge order, which are tokens as they are and merged."""
    try:
        lines = read_file(path, _MAX_BYTES).decode().replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text ({error.reason}); {_AGAIN}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{path}: line {number} does not merge two tokens of {VOCABULARY} to a third; {_AGAIN}")
        pairs.append((left, right))
    return pairs


def _token(value: Any, origin: str, special: bool = True) -> _Added | None:
    """A token in config files: its text, or an object with its text and flags. special: if it is not stated."""
    if isinstance(value, str):
        return _Added(value)
    if not isinstance(value, dict):
        return None
    one = Fields(value, origin)
    special = one.flag("special", special)
    flags = {name: one.flag(name, False) for name in ("single_word", "lstrip", "rstrip")}
    return _Added(one.text("content"), special, **flags, normalized=one.flag("normalized", not special))


def _others(values: Mapping[str, Any], origin: str) -> Iterator[_Added]:
    """Special tokens without one of the usual roles."""
    for role, value in values.items():
        if role.endswith("_token") and role not in _ROLES and isinstance(value, str):
            yield _Added(value)
    for name in _MORE:
        value = values.get(name)
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            token = _token(one, origin)
            if token is not None:
                yield token


def _listed(settings: Fields) -> dict[int, _Added]:
    """The tokens of added_tokens_decoder."""
    table = settings.raw("added_tokens_decoder", {})
    if not isinstance(table, dict):
        raise ModelError(f"{settings.origin}: added_tokens_decoder is {brief(table)}, which is no object; {_AGAIN}")
    found = {}
    for number, value in table.items():
        token = _token(value, settings.origin, special=False) if isinstance(value, dict) else None
        if token is None:
            raise ModelError(f"{settings.origin}: {brief(value)} is not a token with its flags; {_AGAIN}")
        found[_id(number, settings.origin)] = token
    return found


def _in_older_file(listed: Fields, special: list[_Added]) -> dict[int, _Added]:
    """The tokens of added_tokens.json, which has no flags."""
    marked = {token.content for token in special}
    return {
        _id(number, listed.origin): _Added(text, text in marked, normalized=text not in marked)
        for text, number in listed.values.items()
    }


def _id(value: Any, origin: str) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 9 else value
    if type(number) is not int or not 0 <= number < _MAX_ID:
        raise ModelError(f"{origin}: {brief(value)} is not a token id; {_AGAIN}")
    return number


def _with_added(
    ids: Mapping[str, int], stated: Mapping[str, int], added: Mapping[str, _Added], origin: str
) -> Vocabulary:
    """All tokens by id. stated: ids of added tokens; those without one follow the others."""
    texts: dict[int, str] = {number: text for text, number in ids.items()}
    highest = max(texts)
    for text in added:
        number = stated.get(text, ids.get(text, highest + 1))
        highest = max(highest, number)
        if ids.get(text, number) != number or texts.setdefault(number, text) != text:
            raise ModelError(
                f"{origin}: token {brief(text)} has the id {number}, which {VOCABULARY} contradicts; {_AGAIN}"
            )
    kinds = {
        number: NORMAL if text not in added else CONTROL if added[text].special else USER_DEFINED
        for number, text in texts.items()
    }
    whole_range = range(max(texts) + 1)
    return Vocabulary(
        tuple(texts.get(number, f"[PAD{number}]") for number in whole_range),
        tuple(kinds.get(number, UNUSED) for number in whole_range),
        origin,
    )


def _spaced(own: _Class, origin: str) -> dict[str, Any]:
    """The splitting of a text that gets a space at its beginning."""
    if own is not _GPT2:
        raise ModelError(f"{origin}: add_prefix_space is true, which this class of tokenizers cannot have; {INSTEAD}")
    return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
