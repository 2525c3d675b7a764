"""Types between the HTTP side and the engine's thread: requests, deltas of text, and a record at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llmc.runtime.binding.placed_rows import PlacedRows
from llmc.runtime.guided.shared_guides import Guide
from llmc.runtime.outputs import RequestFailure
from llmc.runtime.params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt for the engine.

    deadline_s: seconds from submission until the request ends with the reason "timeout"; None: never. guide: makes a
    Guide of an empty text; called in a worker thread. index: number that its deltas carry. vector_width: numbers of the
    vector it gives in place of tokens; 0: it gives tokens. adapter: the engine's number of a LoRA adapter, 0 for none.
    placed: rows of images in place of tokens of the prompt. told, resumes: as in Generation. A request that resumes a
    continuation has n 1, and `prompt_token_ids` is the prompt alone.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    guide: Callable[[], Guide] | None = None
    index: int = 0
    vector_width: int = 0
    adapter: int = 0
    placed: Sequence[PlacedRows] = ()
    told: Mapping[int, Sequence[int]] = field(default_factory=dict)
    resumes: int | None = None

    @property
    def given_token_ids(self) -> Sequence[int]:
        """Output tokens that the engine starts from. It draws the last sent token once more, as a check."""
        return () if self.resumes is None else self.told.get(self.resumes, ())[:-1]


@dataclass(frozen=True)
class RequestRecord:
    """A request that ended, given once to every `AsyncEngine.on_record`. Times are on time.monotonic_ns(); 0: never
    reached.

    token_gaps_ns: from each token of a continuation to its next one. engine_id: the engine's id of it; 0: it was never
    submitted.
    """

    request_id: str
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    finished_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]
    error: str | None = None
    token_gaps_ns: tuple[int, ...] = ()
    engine_id: int = 0


class RequestFailed(RuntimeError):
    """The engine failed a request that it had accepted; `failure` says why."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class QueueFull(RuntimeError):
    """The engine's queue is full; the message is one sentence. retry_after_s: when to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerStopping(RuntimeError):
    """The server takes no more requests because it starts or stops."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""
