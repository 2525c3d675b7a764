"""Devices that run artifacts, through the C ABI: which kinds there are, and one that is opened."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from ctypes import byref, c_uint64, c_void_p

from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.handle import Handle, call

DeviceOption = str | int | bool


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device that this library has: its name, as artifacts say it, and a line about it."""

    name: str
    summary: str


def device_kinds() -> list[DeviceKind]:
    """All kinds, in the order in which they registered."""
    count = c_uint64()
    call("llmc_device_list_kinds", None, 0, byref(count))
    native = (abi.DeviceKind * max(1, count.value))()
    native[0].struct_size = ctypes.sizeof(abi.DeviceKind)
    call("llmc_device_list_kinds", native, count.value, byref(count))
    return [DeviceKind(kind.name.decode(), kind.summary.decode()) for kind in native[: count.value]]


def _text(value: DeviceOption) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


class Device(Handle):
    """An opened device. Engines and replayers made on it go on after close()."""

    _destroy = "llmc_device_close"

    def __init__(self, kind: str, options: Mapping[str, DeviceOption] | None = None) -> None:
        """options: those of the kind, as llmc_device_open of llmc.h lists them. Raises LlmcError."""
        super().__init__()
        given = {key: _text(value) for key, value in (options or {}).items()}
        native = (abi.KeyValue * len(given))(
            *(abi.KeyValue(key.encode(), value.encode()) for key, value in given.items())
        )
        pointer = c_void_p()
        call("llmc_device_open", kind.encode(), native, len(given), byref(pointer))
        self._pointer = pointer

    @property
    def facts(self) -> dict[str, str]:
        """What it is and can do, by name."""
        count = c_uint64()
        call("llmc_device_get_facts", self.pointer, None, 0, byref(count))
        native = (abi.KeyValue * count.value)()
        call("llmc_device_get_facts", self.pointer, native, count.value, byref(count))
        return {fact.key.decode(): fact.value.decode() for fact in native[: count.value]}


WEIGHT_MEMORY = ("auto", "mapped", "copied")
"""Where a CPU reads weights: in their mapped file, or in huge pages, to which "auto" moves large ones as it runs and to
which "copied" moves them at once; see llmc.h."""
DEVICE_OPTIONS = {
    "num_threads": "threads",
    "pin_threads": "pin",
    "idle_spin_us": "idle_spin_us",
    "weight_memory": "weights",
}
"""Keyword arguments of engines and replayers that go to the device that they open, and its names for them."""


@contextlib.contextmanager
def device_for(artifact: Artifact, device: Device | None, options: Mapping[str, DeviceOption]) -> Iterator[Device]:
    """`device`, or one of the artifact's kind for as long as it takes to make something on it.

    options: of them, those among DEVICE_OPTIONS; a device that is open has its own. Raises LlmcError and TypeError.
    """
    given = {DEVICE_OPTIONS[name]: value for name, value in options.items() if name in DEVICE_OPTIONS}
    if device is None:
        with Device(artifact.info.target_kind, given) as opened:
            yield opened
        return
    if given:
        raise TypeError(f"the device is open already and takes no options: open it with {', '.join(given)}")
    yield device
