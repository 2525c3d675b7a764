"""The body in which KV blocks go from server to server: frames, each a length in 4 bytes, little endian, and that many
bytes of llmc_engine_export_blocks. A frame of length 0 ends it, so that a body cut short is noticed."""

from __future__ import annotations

LENGTH_BYTES = 4
END = bytes(LENGTH_BYTES)


class FrameError(ValueError):
    """The body is no sequence of frames; the message is one sentence."""


def framed(data: bytes) -> bytes:
    """One frame."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class FrameReader:
    """Takes a body as it arrives. most: bytes of a frame; so it never holds more than that and a piece."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = bytearray()
        self.ended = False
        """Whether the last frame has arrived."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The frames that are complete with these bytes. Raises FrameError."""
        if piece and self.ended:
            raise FrameError(f"there are {len(piece)} bytes behind the last frame")
        self._buffer += piece
        frames = []
        while len(self._buffer) >= LENGTH_BYTES and not self.ended:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if size > self._most:
                raise FrameError(f"a frame has {size} bytes, more than {self._most}")
            end = LENGTH_BYTES + size
            if len(self._buffer) < end:
                break
            if size:
                frames.append(bytes(self._buffer[LENGTH_BYTES:end]))
            self.ended = size == 0
            del self._buffer[:end]
        if self.ended and self._buffer:
            raise FrameError(f"there are {len(self._buffer)} bytes behind the last frame")
        return frames
