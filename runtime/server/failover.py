"""Continues an answer that another server began: what the client already has, and what the router is told of the rest.

A stream to a router contains SSE comments that describe the events before them. A router that forwards events up to a
comment, and no further, knows which tokens its client has:

    : llmc head               the events before the first token
    : llmc 1 17,4,85          tokens of choice 1
    : llmc 0 9,2 end          and the end of choice 0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from llmc.runtime.guided.shared_guides import Guide
from llmc.runtime.outputs import TokenDelta

from .errors import ApiError
from .protocol.failover import Failover
from .requests import EngineRequest

_SPREAD = 0x9E3779B97F4A7C15


class Resumption:
    """What one HTTP request says about the answer so far. failover: None if it did not come from a router.

    num_outputs: choices per prompt; choices are numbered `prompt * num_outputs + output`. redraws: the told delta of a
    choice needs the logprobs of its tokens, so the engine draws all of them once more. num_events: events that the
    client has.
    """

    def __init__(self, failover: Failover | None, num_outputs: int, *, redraws: bool = False) -> None:
        self._failover = failover
        self._num_outputs = num_outputs
        self._redraws = redraws
        self.num_events = (failover and failover.num_events) or 0
        sent = (failover and failover.sent) or ()
        self._token_ids = [choice.token_ids for choice in sent]
        self._ended = [bool(choice.ended) for choice in sent]
        self.num_tokens = sum(map(len, self._token_ids))

    @property
    def begun(self) -> bool:
        """Whether the client has what comes before the first token."""
        return self._failover is not None and self._failover.sent is not None

    @property
    def head(self) -> bytes:
        """The comment behind what comes before the first token."""
        return b"" if self._failover is None else b": llmc head\n\n"

    def sent(self, prompt: int, output: int) -> Sequence[int]:
        """The tokens of a choice that the client has."""
        return self._token_ids[prompt * self._num_outputs + output] if self._token_ids else ()

    def ended(self, prompt: int, output: int) -> bool:
        """Whether the client has a choice to its end."""
        return bool(self._ended) and self._ended[prompt * self._num_outputs + output]

    def comment(self, delta: TokenDelta) -> bytes:
        """The comment after the events of a delta."""
        if self._failover is None:
            return b""
        choice = delta.index * self._num_outputs + delta.output_index
        end = "" if delta.finish_reason is None else " end"
        return f": llmc {choice} {','.join(map(str, delta.token_ids))}{end}\n\n".encode()

    def engine_requests(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """One request per prompt for the tokens still to draw. Raises ApiError if the choices do not fit the
        request."""
        if self.begun and len(self._token_ids) != len(requests) * self._num_outputs:
            count = len(requests) * self._num_outputs
            message = f"llmc_failover.sent has {len(self._token_ids)} entries: give one for each of {count} choices"
            raise ApiError(message, param="llmc_failover.sent", code="invalid_value")
        left: list[EngineRequest] = []
        for prompt, request in enumerate(requests):
            left += self._left(prompt, request) if self.num_tokens or any(self._ended) else [request]
        return left

    def _left(self, prompt: int, request: EngineRequest) -> list[EngineRequest]:
        outputs = [output for output in range(self._num_outputs) if not self.ended(prompt, output)]
        told = {output: self.sent(prompt, output) for output in range(self._num_outputs)}
        if not outputs:
            return []
        if self._redraws or request.params.prompt_logprobs is not None:
            # The latter need the prompt computed anyway, and are told with the first token of each continuation.
            return [dataclasses.replace(request, told=told)]
        return [
            dataclasses.replace(
                request,
                request_id=request.request_id if self._num_outputs == 1 else f"{request.request_id}-{output}",
                params=dataclasses.replace(request.params, n=1),
                guide=_begun(request.guide, told[output][:-1]),
                told={output: told[output]},
                resumes=output,
            )
            for output in outputs
        ]


def spread_seed(failover: Failover | None, request: EngineRequest) -> EngineRequest:
    """The request with a seed of its own, as prompts of a batch have if nobody gives one. `request` has the router's
    seed."""
    if failover is None or request.index == 0 or request.params.seed is None:
        return request
    seed = (request.params.seed + request.index * _SPREAD) % 2**64
    return dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))


def _begun(make: Callable[[], Guide] | None, token_ids: Sequence[int]) -> Callable[[], Guide] | None:
    """Makes guides whose text has already begun with these tokens."""
    return make if make is None or not token_ids else partial(_guide_of, make, token_ids)


def _guide_of(make: Callable[[], Guide], token_ids: Sequence[int]) -> Guide:
    guide = make()
    for token_id in token_ids:
        guide.accept(token_id)
    return guide
