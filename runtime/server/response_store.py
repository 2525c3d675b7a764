"""Stored answers of /v1/responses: in memory only, bounded, and visible only to the key that asked."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError
from .refusals import PREVIOUS

Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """owner: number of its key. response: as it was answered. input_items: of its request. history: the conversation,
    from its first item to the answer's last. num_bytes: size as JSON, including what it shares with earlier answers."""

    owner: int | None
    response: dict[str, Any]
    input_items: Sequence[Item]
    history: Sequence[Item]
    num_bytes: int


class ResponseStore:
    """Holds at most max_count answers and max_bytes. Beyond that, the key that holds most loses its least recently used
    answer."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._held: Counter[int | None] = Counter()  # bytes by owner

    @property
    def enabled(self) -> bool:
        return self._max_count > 0

    def get(self, owner: int | None, response_id: str) -> StoredResponse:
        """The stored answer. Raises ApiError 404, also for an answer of another key."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise ApiError(
                f"there is no response {response_id[:80]!r}: it was never stored, deleted, or gave way to newer ones",
                status=404,
                param="response_id",
                code="response_not_found",
            )
        self._kept.move_to_end(response_id)
        return found

    def history(self, owner: int | None, response_id: str | None) -> Sequence[Item]:
        """The conversation up to an answer; empty for None. Raises ApiError 400, the code that OpenAI uses."""
        if response_id is None:
            return ()
        try:
            return self.get(owner, response_id).history
        except ApiError as error:
            code = PREVIOUS
            raise ApiError(str(error), param="previous_response_id", code=code) from error

    def put(self, stored: StoredResponse) -> None:
        """Stores an answer unless it alone is too large. It replaces an answer of the same id: a router that tries a
        request again gives the same id. An answer of another key stays instead."""
        if stored.num_bytes > self._max_bytes or not self.enabled:
            return
        response_id = stored.response["id"]
        old = self._kept.get(response_id)
        if old is not None:
            if old.owner != stored.owner:
                return
            self._drop(response_id)
        self._kept[response_id] = stored
        self._held[stored.owner] += stored.num_bytes
        while len(self._kept) > self._max_count or self._held.total() > self._max_bytes:
            most = max(self._held, key=lambda one: self._held[one])
            self._drop(next(key for key, one in self._kept.items() if one.owner == most))

    def delete(self, owner: int | None, response_id: str) -> None:
        """Deletes an answer. Raises ApiError 404."""
        self.get(owner, response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._held[gone.owner] -= gone.num_bytes
        if self._held[gone.owner] <= 0:
            del self._held[gone.owner]
