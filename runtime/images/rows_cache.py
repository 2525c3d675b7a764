"""Keeps the rows of images: a chat sends its images again with every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


class RowsCache:
    """Rows by the identity of their image, the latest used ones, up to a number of bytes. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, identity: bytes) -> Rows | None:
        """The rows of an image, which must not be changed; None if they are not here."""
        with self._lock:
            found = self._rows.get(identity)
            if found is not None:
                self._rows.move_to_end(identity)
            return found

    def put(self, identity: bytes, rows: Rows) -> None:
        """Keeps rows, and lets go of those that were not used for longest. Rows beyond the limit are not kept."""
        with self._lock:
            if identity in self._rows or rows.nbytes > self._most_bytes:
                return
            self._rows[identity] = rows
            self.num_bytes += rows.nbytes
            while self.num_bytes > self._most_bytes:
                _, gone = self._rows.popitem(last=False)
                self.num_bytes -= gone.nbytes
