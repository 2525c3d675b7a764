"""What completions and chat have in common: sampling parameters, streaming options, usage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from llmc.runtime.params import SamplingParams

from ..errors import ApiError
from ..refusals import CONFLICT
from .api_model import ApiModel
from .failover import Failover
from .forms import Choices, GuidedJson, ResponseFormat, Structured
from .ranking import check_ranking
from .shapes import NULL, OFF, Items, Text, is_off

log = logging.getLogger("llmc.server")
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 4096
MAX_OUTPUTS = 64
_INT32 = 2**31
_LEAST_TOP_P = 2.0**-126
_MODALITIES: tuple[Any, ...] = (None, [], ["text"])
_REFUSED: Mapping[str, str] = {
    "suffix": "text is not inserted before a suffix: leave it out",
    "prompt_embeds": "embeddings are not a prompt here: give text or token ids",
    "bad_words": "words cannot be forbidden: use logit_bias",
    "allowed_token_ids": "tokens cannot be listed: use guided_regex or logit_bias",
    "logits_processors": "code is not taken from requests: leave it out",
    "cache_salt": "the prefix cache cannot be split: start the server with --no-prefix-cache",
    "functions": "it is superseded: use tools",
    "function_call": "it is superseded: use tool_choice",
    "chat_template": "templates are not taken from requests: start the server with --chat-template",
    "audio": "models here write text: leave it out",
    "web_search_options": "nothing is searched: leave it out",
    "documents": "templates are given none: put them into a message",
    "thinking_token_budget": "reasoning is not cut short: use max_completion_tokens",
    "repetition_detection": "answers are not watched for loops: use repetition_penalty",
    "logprob_token_ids": "tokens cannot be listed: use top_logprobs",
    "return_tokens_as_token_ids": "tokens are told as text: use return_token_ids",
    "return_prompt_text": "the rendered prompt is not sent back: use /tokenize and /detokenize",
    "watermarking": "answers are not marked: leave it out",
}


class StreamOptions(ApiModel):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError("give a non-empty string, or a list of them")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings are too many: give at most {MAX_STOPS}")
    return tuple(stops)


_STOP = {"type": "string", "minLength": 1}
Stops = Annotated[
    Any,
    AfterValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, NULL]}),
]


def _at_most(count: int) -> Callable[[Any], Any]:
    """Bounds an object's keys; Pydantic counts them only after it has validated all."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"{len(value)} entries are too many: give at most {count}")
        return value

    return check


DIGITS = r"^[0-9]{1,10}$"
# OpenAI's range; a larger bias would still only force or forbid a token.
_BIASES = {
    "type": "object",
    "maxProperties": MAX_LOGIT_BIASES,
    "propertyNames": {"pattern": DIGITS},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
# Fields that may constrain the answer's form.
_CONSTRAINTS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class SamplingFields(ApiModel):
    """Parameters that both endpoints take; null is as good as absent. priority: lower runs first. use_beam_search: with
    best_of beams, or n; length_penalty and early_stopping are for that. llmc_failover: of a router.

    Subclasses name in `refused` what would change the answer and has no effect here, and why.
    """

    refused: ClassVar[Mapping[str, str]] = _REFUSED

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    best_of: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-100, le=100)
    early_stopping: bool | Literal["never"] | None = None
    seed: int | None = None  # the engine's seed has 64 bits
    stop: Stops = ()
    stop_token_ids: Items[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[
        dict[Annotated[str, StringConstraints(pattern=DIGITS)], Annotated[float, Field(ge=-100, le=100)]] | None,
        BeforeValidator(_at_most(MAX_LOGIT_BIASES)),
        WithJsonSchema({"anyOf": [_BIASES, NULL]}),
    ] = None
    min_tokens: int | None = Field(None, ge=0, lt=_INT32)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(None, ge=1, lt=_INT32)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-_INT32, lt=_INT32)
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    llmc_failover: Failover | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: GuidedJson | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def num_outputs(self) -> int:
        return self.n or 1

    @property
    def ranks(self) -> bool:
        """Whether continuations are ranked: the best ones are sent when all have ended."""
        return bool(self.use_beam_search) or (self.best_of or 0) > self.num_outputs

    @property
    def has_constraint(self) -> bool:
        """Whether a field may constrain the answer; reading such a constraint may take time."""
        return any(getattr(self, name) is not None for name in _CONSTRAINTS)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raises ApiError for fields that would change the answer but have no effect here, or that exclude each
        other."""
        extra = self.model_extra or {}
        for name, why in self.refused.items():
            if not is_off(self.given(name)):
                raise ApiError(f"{name} is not supported, {why}", param=name, code="unsupported_parameter")
        check_ranking(self)
        if extra.get("modalities") not in _MODALITIES:
            raise ApiError("modalities: models here write text only", param="modalities", code="unsupported_parameter")
        if extra.get("truncation_side") not in (None, "left"):
            message = "truncation_side: the last tokens are kept, use left, or truncate the prompt"
            raise ApiError(message, param="truncation_side", code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            message = "stream_options is for streams: set stream to true, or leave it out"
            raise ApiError(message, param="stream_options", code="invalid_value")
        if self.llmc_failover is not None and self.llmc_failover.sent is not None and not self.stream:
            message = "llmc_failover.sent is for streams: set stream to true, or leave it out"
            raise ApiError(message, param="llmc_failover.sent", code="invalid_value")
        unknown = sorted(extra.keys() - self.refused.keys())
        if unknown:
            log.debug("fields without effect: %s", ", ".join(unknown))

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """As `check`."""
        properties = schema["properties"]
        for name, why in cls.refused.items():
            off = {"enum": list(OFF), "description": f"Not supported, {why}."}
            properties[name] = {"allOf": [properties[name], off]} if name in cls.model_fields else off
        properties["modalities"] = {"enum": list(_MODALITIES)}
        properties["truncation_side"] = {"enum": [None, "left"]}
        streams = {"required": ["stream"], "properties": {"stream": {"const": True}}}
        schema["allOf"] = [{"anyOf": [{"properties": {"stream_options": NULL}}, streams]}]

    def given(self, name: str) -> Any:
        """The value of a field, declared or not."""
        return getattr(self, name) if name in type(self).model_fields else (self.model_extra or {}).get(name)

    def sampling(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        show_special_tokens: bool = False,
    ) -> SamplingParams:
        """The engine's parameters; `defaults` for those the request leaves out. Raises RequestError or ApiError.

        show_special_tokens: in the text, even if the request does not ask for it.
        """
        names = (
            *("temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.min_tokens is not None and self.min_tokens > max_tokens:
            message = (
                f"min_tokens is {self.min_tokens}, above the {max_tokens} tokens that the answer may have: lower it"
            )
            raise ApiError(message, param="min_tokens", code=CONFLICT)
        if self.top_p is not None:
            # The engine takes a 32-bit float above 0. The least one keeps the most likely token, as 0 does elsewhere.
            given["top_p"] = max(self.top_p, _LEAST_TOP_P)
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        elif self.llmc_failover is not None:
            given["seed"] = self.llmc_failover.seed
        if self.use_beam_search:
            # Greedy sampling: the model's sampling defaults have no effect.
            defaults = {}
            given["beam_width"] = max(self.num_outputs, self.best_of or 0)
            given["early_stopping"] = self.early_stopping or False
            given["length_penalty"] = 1.0 if self.length_penalty is None else self.length_penalty
        elif self.best_of is not None:
            given["best_of"] = self.best_of
        return SamplingParams(
            **{**defaults, **given},
            stop=self.stop,
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False and not show_special_tokens,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def is_token_ids(value: Any) -> bool:
    """True for a non-empty list of whole numbers."""
    return isinstance(value, Sequence) and bool(value) and all(type(item) is int for item in value)
