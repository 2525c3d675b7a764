"""Images of requests: looked at and encoded in threads, one image at a time, and never on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request

from llmc.runtime.binding.placed_rows import PlacedRows
from llmc.runtime.images.image_prompt import ImagePrompt
from llmc.runtime.images.tower import Tower, TowerClosed

from .event_stream import until_gone
from .lanes import NICE
from .niceness import give_way
from .requests import ClientGone, QueueFull, ServerStopping

_RETRY_S = 1
_STOPPING = "the server is shutting down and takes no more requests"


class ImageWork:
    """Lives on the event loop. tower: None if the server sees no images. most_waiting: requests whose images wait."""

    def __init__(self, tower: Tower | None, most_waiting: int) -> None:
        self.tower = tower
        self.num_waiting = 0
        self._most_waiting = most_waiting
        # The tower's own threads work on one image; a second one would only take turns with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmc-images", initializer=lambda: give_way(NICE))

    async def placed(
        self, request: Request, prompt: ImagePrompt, ids: Sequence[int], limit_s: float | None = None
    ) -> Sequence[PlacedRows]:
        """The rows of a prompt's images among its token ids. Raises ClientGone if the client leaves before,
        TimeoutError after limit_s seconds, QueueFull, ServerStopping, ImageError, and LlmcError if the device fails.

        No image is begun for a client that has left, or after the limit.
        """
        if not prompt.pictures:
            return ()
        if self.num_waiting >= self._most_waiting:
            raise QueueFull(f"the images of {self.num_waiting} requests wait: try again in {_RETRY_S} s", _RETRY_S)
        gone = threading.Event()

        def work() -> Sequence[PlacedRows]:
            found = prompt.placed(ids, gone.is_set)
            if found is None:
                raise ClientGone
            return found

        self.num_waiting += 1
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError as error:  # the thread has ended
            self.num_waiting -= 1
            raise ServerStopping(_STOPPING) from error
        try:
            async with asyncio.timeout(limit_s):
                return await until_gone(request, gone.set, running)
        except TowerClosed as error:
            raise ServerStopping(_STOPPING) from error
        finally:
            self.num_waiting -= 1

    def close(self) -> None:
        """Ends requests whose images wait or are encoded. The tile that is encoded now goes on: `Tower.close` waits for
        it, on a thread that may wait."""
        if self.tower is not None:
            self.tower.stop()
        self._thread.shutdown(wait=False)
