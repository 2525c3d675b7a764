"""The merged deltas of a request, held in few bytes and objects: thousands of continuations may be pending, and
Python's garbage collector walks every container."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from .generation import Generation
from .outputs import CompletionOutput, RequestFailure, TokenDelta, TokenLogprob
from .params import SamplingParams

# A finished continuation: text, token ids, packed logprobs, and its end. The collector skips plain tuples of texts and
# numbers.
_Packed = tuple[bytes, bytes]
_Whole = tuple[str, tuple[int, ...], tuple[_Packed, ...] | None, tuple[str | None, str | int | None, str | None]]


class _Part:
    """A running continuation. logprobs: packed, per delta; None if not requested."""

    __slots__ = ("logprobs", "text", "token_ids")

    def __init__(self, *, logprobs: bool) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[_Packed] | None = [] if logprobs else None

    def add(self, delta: TokenDelta) -> None:
        if delta.text:
            self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs:
            self.logprobs.append(_pack(delta.logprobs))

    def whole(self, end: TokenDelta | None) -> _Whole:
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        ended = ("error", None, None) if end is None else (end.finish_reason, end.stop_reason, end.finish_detail)
        return "".join(self.text), tuple(self.token_ids), logprobs, ended


def _output(index: int, whole: _Whole) -> CompletionOutput:
    text, token_ids, logprobs, (finish_reason, stop_reason, finish_detail) = whole
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason=finish_reason or "error",
        stop_reason=stop_reason,
        logprobs=None if logprobs is None else tuple(one for part in logprobs for one in _unpack(part)),
        finish_detail=finish_detail,
    )


class Gathered:
    """The merged deltas of one request. prompt_logprobs: one entry per prompt token except the first, or None."""

    def __init__(self, params: SamplingParams) -> None:
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.num_cached_tokens = 0
        self.error: RequestFailure | None = None
        self._params = params
        self._parts: dict[int, _Part] = {}
        self._ended: dict[int, _Whole] = {}

    def add(self, delta: TokenDelta) -> None:
        """Adds the next delta."""
        which = delta.output_index
        part = self._parts.get(which)
        if part is None:
            part = self._parts[which] = self._new_part()
        part.add(delta)
        self.num_cached_tokens = delta.num_cached_tokens
        self.error = self.error or delta.error
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._ended[which] = self._parts.pop(which).whole(delta)

    def take_all(self, generation: Generation, told: Callable[[TokenDelta], None] | None = None) -> None:
        """Takes all pending deltas of a generation, and reports them."""
        while (delta := generation.next_delta()) is not None:
            self.add(delta)
            if told is not None:
                told(delta)

    @property
    def num_tokens(self) -> int:
        """Tokens of all continuations."""
        running = sum(len(part.token_ids) for part in self._parts.values())
        return running + sum(len(token_ids) for _, token_ids, _, _ in self._ended.values())

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The continuations, rebuilt on each access; an unfinished one has the reason "error"."""
        return tuple(_output(index, self._whole(index)) for index in range(self._params.n))

    def _whole(self, index: int) -> _Whole:
        return self._ended.get(index) or self._parts.get(index, self._new_part()).whole(None)

    def _new_part(self) -> _Part:
        return _Part(logprobs=self._params.logprobs is not None)


def _pack(entries: tuple[TokenLogprob, ...]) -> _Packed:
    integers, numbers = array("q"), array("d")
    for one in entries:
        integers.extend((one.token_id, one.rank, len(one.top), *one.top))
        numbers.extend((one.logprob, *one.top.values()))
    return integers.tobytes(), numbers.tobytes()


def _unpack(packed: _Packed) -> Iterator[TokenLogprob]:
    integers, numbers = array("q", packed[0]), array("d", packed[1])
    i = n = 0
    while i < len(integers):
        token_id, rank, count = integers[i : i + 3]
        top = dict(zip(integers[i + 3 : i + 3 + count], numbers[n + 1 : n + 1 + count], strict=True))
        yield TokenLogprob(token_id, numbers[n], top, rank)
        i, n = i + 3 + count, n + 1 + count
