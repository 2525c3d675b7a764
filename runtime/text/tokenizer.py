"""The tokenizer of an artifact: text to ids, ids to text, chat messages to text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.manifest import ManifestError, read_listed
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.chat_template import ChatTemplates, token_text

# The library holds Python's lock for a single text. It releases the lock for a batch, which costs more to start.
_SHORT = 4096


class TokenizerError(RuntimeError):
    """Missing or damaged tokenizer files; the message is one sentence."""


class TooManyTokens(RequestError):
    """A text with more tokens than its caller accepts."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens: at most {most} are taken")
        self.num_tokens = num_tokens


class NoRoom(RequestError):
    """A limit of tokens that leaves nothing of a text, or of the second text of a pair."""

    def __init__(self, most: int, what: str, least: int, beside: str, remedy: str = "") -> None:
        """least: tokens that leave one of `what`. beside: what takes the others."""
        super().__init__(
            f"a limit of {most} tokens leaves no room for {what} beside {beside}: allow at least {least}{remedy}"
        )


class Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja of `path`.

    chat_template: a template instead of the model's own. Raises TokenizerError when tokenizer.json is missing,
    TokenizerError or ChatTemplateError when one of them is not readable.
    """

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        file = path / "tokenizer.json"
        content = _listed(path, file.name)
        if content is None:
            raise TokenizerError(f"{file} is missing: give prompts as token ids, or compile from a model that has it")
        from tokenizers import Tokenizer as Backend  # behind that: token ids run where the package is missing

        try:
            self._backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"cannot read {file}: {_one_line(error)}; correct the model's and compile it again"
            ) from error
        # A file may carry limits from training; prompts are checked against the artifact instead.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Older models list their special tokens only in the map.
        self.config = _read_json(path, "special_tokens_map.json") | _read_json(path, "tokenizer_config.json")
        self.generation_config = read_generation_config(path)
        self._chat_templates = ChatTemplates(path, self.config, chat_template)
        self.bos_token = token_text(self.config.get("bos_token"))
        self.eos_token = token_text(self.config.get("eos_token"))
        self.bos_token_id = self._id("bos_token_id", self.bos_token)
        eos = self.generation_config.get("eos_token_id")
        fallback = None if self.eos_token is None else self._backend.token_to_id(self.eos_token)
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else (fallback if eos is None else eos,)
        self.eos_token_ids = tuple(token for token in self.eos_token_ids if token is not None)

    def _id(self, key: str, token: str | None) -> int | None:
        value = self.generation_config.get(key)
        if isinstance(value, int):
            return value
        return None if token is None else self._backend.token_to_id(token)

    def token_id(self, text: str) -> int | None:
        """Id of the token whose text is exactly `text`, special or not; None if there is none."""
        return self._backend.token_to_id(text)

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token `text`, which decoding leaves out; None if there is none."""
        token = self._backend.token_to_id(text)
        added = None if token is None else self._backend.get_added_tokens_decoder().get(token)
        return token if added is not None and added.special else None

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """`encode`, but an empty text becomes the beginning of a document, as in OpenAI's API. That is the bos token,
        or else an eos token, after which documents begin in training. Empty if the model has neither."""
        ids = self.encode(text, add_special_tokens=add_special_tokens, most=most)
        return ids or [token for token in (self.bos_token_id, *self.eos_token_ids) if token is not None][:1]

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of `text`, with special tokens as tokenizer.json and `add_bos_token` say.

        A long text is tokenized without Python's lock. Raises RequestError; TooManyTokens beyond `most` tokens.
        """
        with _panics("tokenize the prompt"):
            if len(text) <= _SHORT:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        # Too many ids are only counted: making a list of a million holds the lock for long.
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), most)
        ids = list(encoding.ids)
        wants_bos = add_special_tokens and self.config.get("add_bos_token") is True
        if wants_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_row(
        self, text: str, second: str | None = None, *, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text or a pair of texts, with the tokenizer's special tokens, and the kind of each, 0 or 1.

        most: limit of ids; the text, or the second text of a pair, is cut at its end. Raises RequestError; NoRoom if
        nothing is left of it.
        """
        with _panics("tokenize the text"):
            if most is None:
                encoding = self._backend.encode(text, second, add_special_tokens=True)
                return list(encoding.ids), list(encoding.type_ids)
            parts = [self._backend.encode(one, add_special_tokens=False) for one in (text, second) if one is not None]
        num_special = self._backend.num_special_tokens_to_add(second is not None)
        first = 0 if second is None else len(parts[0])
        room, least, special = most - num_special - first, num_special + first + 1, f"{num_special} special tokens"
        if room < min(1, len(parts[-1])):
            if second is None:
                raise NoRoom(most, "the text", least, special)
            remedy = ", or shorten the first text"
            raise NoRoom(most, "the second text", least, f"{first} tokens of the first and {special}", remedy)
        with _panics("tokenize the text"):
            parts[-1].truncate(room)
            encoding = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids unknown to the tokenizer decode to nothing. Raises RequestError."""
        with _panics("decode the tokens"):
            if len(token_ids) <= _SHORT:
                return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(self._chat_templates)

    @property
    def chat_template_text(self) -> str:
        """The source of the model's chat templates; empty without one."""
        return self._chat_templates.text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], placeholder: str | None = None, /, **options: Any
    ) -> str:
        """The prompt of a conversation; arguments and errors are those of ChatTemplates.render."""
        return self._chat_templates.render(messages, placeholder, **options)


def artifact_tokenizer(path: Path, chat_template: str | None = None) -> Tokenizer | None:
    """The tokenizer of an artifact; None if it was compiled without.

    Raises TokenizerError if it is damaged, or listed in the manifest but missing.
    """
    if os.path.lexists(path / "tokenizer.json") or _listed(path, "tokenizer.json") is not None:
        return Tokenizer(path, chat_template)
    return None


def read_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of an artifact; empty when there is none. Raises TokenizerError."""
    return _read_json(path, "generation_config.json")


@contextmanager
def _panics(what: str) -> Iterator[None]:
    """Converts errors and panics of the library to RequestError; a regular expression may overflow its stack."""
    try:
        yield
    except BaseException as error:
        # A panic is not an Exception, so that nobody handles it as one by mistake.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, TypeError):
            # Python keeps bytes that are not UTF-8, as of a command line, as halves of surrogate pairs.
            raise RequestError(f"cannot {what}: it has bytes that are not UTF-8; convert it first") from error
        raise RequestError(f"cannot {what}: {_one_line(error)}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    content = _listed(folder, name)
    if content is None:
        return {}
    try:
        data = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {folder / name}: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{folder / name} must hold a JSON object, not {type(data).__name__}")
    return data


def _listed(folder: Path, name: str) -> bytes | None:
    try:
        return read_listed(folder, name)
    except ManifestError as error:
        raise TokenizerError(str(error)) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
