"""Sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llmc.shown import shown

from .fixed_biases import FixedBiases
from .request_error import RequestError

if TYPE_CHECKING:
    from llmc.runtime.guided.constraint import Guided

MAX_CONTINUATIONS = 64
MAX_LOGPROBS = 20
EarlyStopping: TypeAlias = Literal[False, True, "never"]
_EARLY_STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")  # in the order of the C ABI's codes


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; a request with a seed is a pure function of (artifact, request).

    n: number of independent continuations, 1 … 64.
    max_tokens: most generated tokens; clipped by the artifact's max_model_len.
    min_tokens: generated tokens before which eos and stops are ignored.
    temperature: 0 for greedy. top_k: 0 or -1 for off.
    seed: None lets the engine draw one.
    stop: strings that end the text, and are omitted from it.
    include_stop_str_in_output: whether the stop string, or the token that ended the text, is part of it.
    skip_special_tokens: whether to omit special tokens from the text.
    logit_bias: value added to the logit of a token id.
    logprobs: None, or 0 … 20 alternatives per sampled token. prompt_logprobs: the same for prompt tokens. guided: a
    constraint on the output, as in Guided.json_schema({...}).
    best_of: continuations drawn; the n with the highest sum of logprobs are returned, likeliest first.
    beam_width: beams of a beam search, whose n best are returned, best first; 0 for none. With beams, or best_of above
    n, all output comes at the end.
    length_penalty, early_stopping: as in BeamSearchParams.
    Equal parameters have equal hashes, so they may be keys. They can be pickled.
    Raises RequestError for a value out of range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    guided: Guided | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, _plain(getattr(self, one.name)))
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(_plain, _listed("stop_token_ids", self.stop_token_ids))))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias {shown(self.logit_bias)} is no mapping: give values by token id")
        biases = {_plain(token): _plain(bias) for token, bias in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", FixedBiases(biases))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} {shown(getattr(self, name))} is neither True nor False")
        _whole("n", self.n, 1, MAX_CONTINUATIONS)
        _whole("max_tokens", self.max_tokens, 1, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("top_k", self.top_k, -1, (1 << 31) - 1)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p 0 leaves no token: use a value above 0, or temperature 0 for greedy")
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, (1 << 64) - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop {shown(text)} is not a non-empty string: leave it out")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, (1 << 31) - 1)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token", token, 0, (1 << 31) - 1)
            _real(f"logit_bias of token {token}", bias, -1000.0, 1000.0)
        self._check_ranking()

    def _check_ranking(self) -> None:
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, MAX_CONTINUATIONS)
        if self.beam_width != 0:
            _whole("beam_width", self.beam_width, self.n, MAX_CONTINUATIONS)
        _real("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise RequestError(f'early_stopping {shown(self.early_stopping)} is unknown: use False, True or "never"')
        if not self.ranks:
            return
        what = "beam search" if self.beam_width else "best_of above n"
        if self.beam_width and self.best_of is not None:
            raise RequestError(
                "best_of does not go with beam search, which returns n of the beams: leave out one of them"
            )
        if self.stop:
            raise RequestError(f"stop does not go with {what}, continuations are ranked whole: use stop_token_ids")
        if self.guided is not None:
            raise RequestError(f"guided does not go with {what}: leave out one of them")
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        if self.beam_width and (penalties or self.logit_bias):
            raise RequestError("penalties and logit_bias do not go with beam search, nothing is drawn: leave them out")

    @property
    def ranks(self) -> bool:
        """Whether continuations are ranked: nothing is reported before all have ended, then the best."""
        return self.beam_width > 0 or self.num_drawn > self.n

    @property
    def num_drawn(self) -> int:
        """Continuations that the engine runs concurrently."""
        return max(self.n, self.best_of or 0, self.beam_width)

    @property
    def num_logprobs(self) -> int:
        """`logprobs` in the C ABI's form: -1 for none."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def early_stopping_code(self) -> int:
        """`early_stopping` in the C ABI's form."""
        return _EARLY_STOPPING.index(self.early_stopping)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json), overridden by those `overrides` that are not None.

        A config with do_sample false, or without sampling keys, is greedy. Raises RequestError.
        """
        values: dict[str, Any] = {}
        if config.get("do_sample"):
            keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            values = {key: config[key] for key in keys if config.get(key) is not None}
        else:
            values = {"temperature": 0.0}
        values.update({key: value for key, value in overrides.items() if value is not None})
        return cls(**values)


def _plain(value: Any) -> Any:
    """A number of another library as Python's own, which the C ABI takes."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """None is nothing."""
    if value is not None and (not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping))):
        raise RequestError(f"{name} {shown(value)} is no list: give one")
    return tuple(value or ())


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} {shown(value)} is out of range: use a whole number from {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fine or not low <= value <= high or not math.isfinite(value):  # type: ignore[arg-type, operator]
        raise RequestError(f"{name} {shown(value)} is out of range: use a number from {low:g} to {high:g}")
