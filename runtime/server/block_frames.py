"""The body in which KV blocks go from server to server: frames, each a length in 4 bytes, little endian, and that many
bytes of llmc_hand_over_export, sealed. A frame of length 0 ends it, so that a body cut short is noticed."""

from __future__ import annotations

LENGTH_BYTES = 4
END = bytes(LENGTH_BYTES)


class FrameError(ValueError):
    """The body is no sequence of frames; the message is one sentence."""


def length_of(data: bytes | memoryview) -> bytes:
    """What precedes the data of a frame."""
    return len(data).to_bytes(LENGTH_BYTES, "little")


class FrameReader:
    """Takes a body as it arrives. most: bytes of a frame; so it never holds more than that."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = bytearray()
        self._frame: bytearray | None = None
        self._filled = 0
        self.ended = False
        """Whether the last frame has arrived."""

    @property
    def within_frame(self) -> bool:
        """Whether a frame has begun, and not arrived whole."""
        return bool(self._length) or self._frame is not None

    def feed(self, piece: bytes) -> list[bytearray]:
        """The frames that are complete with these bytes. Raises FrameError."""
        rest, frames = memoryview(piece), []
        while rest:
            if self.ended:
                raise FrameError(f"there are {len(rest)} bytes behind the last frame")
            if self._frame is None:
                rest = self._begin(rest)
                continue
            count = min(len(rest), len(self._frame) - self._filled)
            self._frame[self._filled : self._filled + count] = rest[:count]
            self._filled, rest = self._filled + count, rest[count:]
            if self._filled == len(self._frame):
                frames.append(self._frame)
                self._frame = None
        return frames

    def _begin(self, rest: memoryview) -> memoryview:
        """Takes bytes of a length; returns those behind it."""
        count = LENGTH_BYTES - len(self._length)
        self._length += rest[:count]
        if len(self._length) == LENGTH_BYTES:
            size = int.from_bytes(self._length, "little")
            self._length.clear()
            if size > self._most:
                raise FrameError(f"a frame has {size} bytes, more than {self._most}")
            self.ended = size == 0
            if size:
                self._frame, self._filled = bytearray(size), 0
        return rest[count:]
