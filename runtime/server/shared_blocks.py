"""Memory that a prefill server shares with a decode server of the same host.

KV blocks go through it, and the connection carries only where they are.

The memory has no name in any file system, so nothing is left behind, whichever process dies. The decode server opens it
by /proc, which the kernel allows to processes of the same user alone. Checksums are left out: they find what a network
damages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import stat
import struct

from .block_frames import FrameError

ADDRESS_HEADER = "x-llmc-memory"
"""Header of an answer whose blocks go through memory: where that is."""
SLOTS = 4
"""Parts that the memory holds."""
# At the front: a number that nobody guesses, which tells the right memory from another, and how many parts were taken.
_HEAD, _COUNT, _HEAD_BYTES, _NONCE_BYTES = struct.Struct("<32sI"), struct.Struct("<I"), mmap.PAGESIZE, 32
_FRAME = struct.Struct("<II")  # the number of a part, and its bytes
_COUNT_AT = _NONCE_BYTES
# As of linux/fcntl.h: seal, shrink, grow. A Python built on an older system lacks the names.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 1 | 2 | 4
_WRAP = 1 << 32


class GivenMemory:
    """The side of the prefill server. slot_bytes: of the largest part. Raises OSError if the system has no memory."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes, self._given = slot_bytes, 0
        size = _HEAD_BYTES + SLOTS * slot_bytes
        if not hasattr(os, "memfd_create"):
            raise OSError("this Python has no memfd_create")
        self._fd = os.memfd_create("llmc-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            # Whoever maps it could otherwise be killed by a read beyond its end.
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _HEAD.pack_into(self._map, 0, nonce, 0)
        self.address = f"{os.getpid()} {self._fd} {slot_bytes} {nonce.hex()}"
        """For ADDRESS_HEADER."""

    @property
    def num_free(self) -> int:
        """Parts that can be given now."""
        taken: int = _COUNT.unpack_from(self._map, _COUNT_AT)[0]
        return max(0, SLOTS - (self._given - taken) % _WRAP)

    def slot(self, ahead: int = 0) -> memoryview:
        """Memory for the next part, or for one that many parts behind it."""
        return _slot(self._map, self._given + ahead, self._slot_bytes)

    def give(self, num_bytes: int) -> bytes:
        """The frame that tells of the next part, which is in its slot."""
        frame = _FRAME.pack(self._given % _WRAP, num_bytes)
        self._given += 1
        return frame

    def close(self) -> None:
        """Gives the memory up; the other side may still read it."""
        os.close(self._fd)


class TakenMemory:
    """The side of the decode server. address: as the other side has it. slot_bytes: the most that a part may have.

    Raises OSError and ValueError if the memory cannot be opened: the other process is not of this host and user.
    """

    def __init__(self, address: str, slot_bytes: int) -> None:
        pid, fd, given_bytes, nonce = _parsed(address)
        if given_bytes > slot_bytes:
            raise ValueError(f"a part has {given_bytes} bytes, more than {slot_bytes}")
        self._slot_bytes, self._taken = given_bytes, 0
        size, path = _HEAD_BYTES + SLOTS * given_bytes, f"/proc/{pid}/fd/{fd}"
        # In another namespace this may be anything; opening a pipe or a device might do something.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} is no memory")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.closing(_Descriptor(opened)):
            if os.fstat(opened).st_size != size or fcntl.fcntl(opened, _GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"{path} is other memory")
            self._map = mmap.mmap(opened, size)
        if not hmac.compare_digest(self._map[:_NONCE_BYTES], nonce):
            raise ValueError(f"{path} is memory of somebody else")

    def part(self, frame: bytes | bytearray) -> memoryview:
        """The part of which a frame tells. Raises FrameError."""
        if len(frame) != _FRAME.size:
            raise FrameError(f"a frame has {len(frame)} bytes, and tells of no memory")
        number, num_bytes = _FRAME.unpack(frame)
        if number != self._taken % _WRAP or num_bytes > self._slot_bytes:
            raise FrameError(f"a frame tells of part {number} with {num_bytes} bytes, which is not the next one")
        return _slot(self._map, number, self._slot_bytes)[:num_bytes]

    def release(self) -> None:
        """The other side may use the slot of the part again."""
        self._taken += 1
        _COUNT.pack_into(self._map, _COUNT_AT, self._taken % _WRAP)


class _Descriptor:
    """Closes a file descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number

    def close(self) -> None:
        os.close(self._number)


def _slot(memory: mmap.mmap, number: int, slot_bytes: int) -> memoryview:
    start = _HEAD_BYTES + number % SLOTS * slot_bytes
    return memoryview(memory)[start : start + slot_bytes]


def _parsed(address: str) -> tuple[int, int, int, bytes]:
    """Process, file descriptor, bytes of a slot, nonce. Raises ValueError."""
    words = address.split(" ")
    if len(words) != 4 or not all(word.isdecimal() and len(word) < 20 for word in words[:3]):
        raise ValueError(f"{address[:80]!r} is no address of memory")
    nonce = bytes.fromhex(words[3])
    if len(nonce) != _NONCE_BYTES:
        raise ValueError(f"{address[:80]!r} is no address of memory")
    return int(words[0]), int(words[1]), int(words[2]), nonce
