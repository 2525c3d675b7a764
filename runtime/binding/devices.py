"""Devices that run artifacts, through the C ABI: which kinds there are, and one that is opened."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from ctypes import byref, c_uint64, c_void_p

from llmc.cache_root import cache_root
from llmc.cuda_loader import cuda_library
from llmc.mpi_loader import MpiRank, mpi_rank
from llmc.opencl_loader import opencl_library
from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.handle import Handle, call
from llmc.runtime.binding.mpi_ranks import MpiRanks, cpus_of_rank, follow_rank
from llmc.runtime.binding.ranks import LocalRanks

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


def _defaults(kind: str) -> dict[str, DeviceOption]:
    """What this process gives a device beside what is asked for."""
    if kind == "cuda":
        return {"library": cuda_library()}
    return {"library": opencl_library(), "cache": str(cache_root() / "opencl")} if kind == "opencl" else {}


def _text(value: DeviceOption) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


class Device(Handle):
    """An opened device. Engines and replayers made on it go on after close()."""

    _destroy = "llmc_device_close"

    def __init__(self, kind: str, options: Mapping[str, DeviceOption] | None = None) -> None:
        """options: those of the kind, as llmc_device_open of llmc.h lists them. Raises LlmcError.

        Where they are not given, the library of "opencl" is `llmc.opencl_loader.opencl_library()`, and its cache a
        folder of llmc's cache directory; the library of "cuda" is `llmc.cuda_loader.cuda_library()`.
        """
        super().__init__()
        given = {key: _text(value) for key, value in {**_defaults(kind), **(options or {})}.items()}
        native = (abi.KeyValue * len(given))(
            *(abi.KeyValue(key.encode(), value.encode()) for key, value in given.items())
        )
        pointer = c_void_p()
        call("llmc_device_open", kind.encode(), native, len(given), byref(pointer))
        self._pointer = pointer
        self.ranks: LocalRanks | MpiRanks | None = None
        """The other ranks, where this is rank 0 of several."""

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
DEVICE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "num_threads": "threads",
        "pin_threads": "pin",
        "idle_spin_us": "idle_spin_us",
        "weight_memory": "weights",
    },
    "opencl": {
        "eager": "eager",
        "device_number": "device",
        "device_sampling": "sample",
        "offload_mib": "offload_mib",
        "program_cache": "cache",
        "opencl_library": "library",
    },
    "cuda": {
        "eager": "eager",
        "device_number": "device",
        "device_sampling": "sample",
        "graph_mib": "graph_mib",
        "offload_mib": "offload_mib",
        "cuda_library": "library",
    },
}
"""By kind: keyword arguments of engines and replayers that go to the device that they open, and its names for them."""
RANK_CPUS = "rank_cpus"
"""The CPUs of each rank of an artifact for several, as `parse_rank_cpus` takes them."""
OPTION_NAMES = frozenset({RANK_CPUS, *(name for names in DEVICE_OPTIONS.values() for name in names)})
"""Those of all kinds. None stands for the default; one that the artifact's kind does not have changes nothing."""


def _of_ranks(artifact: Artifact, given: Mapping[str, DeviceOption], cpus: str | None) -> Iterator[Device]:
    """Rank 0's device. The others do their part of the first thing that is made on it: in processes that are started
    here, or in this one where mpirun has started it as one of them; its end is then that of the process."""
    kind = artifact.info.target_kind
    mpi = mpi_rank()
    if mpi is not None:
        with _started_by_mpi(mpi, artifact, given, cpus) as opened:
            yield opened
        return
    ranks = LocalRanks(artifact.info.num_ranks, cpus)
    with Device(kind, {**given, **ranks.options(0)}) as opened:
        ranks.start(artifact.path, kind, {name: _text(value) for name, value in given.items()})
        opened.ranks = ranks
        ranks.bind()
        try:
            yield opened
        finally:
            ranks.unbind()


@contextlib.contextmanager
def _started_by_mpi(
    mpi: MpiRank, artifact: Artifact, given: Mapping[str, DeviceOption], cpus: str | None
) -> Iterator[Device]:
    """Raises SystemExit where this process is another rank than 0, when that rank's part is done."""
    kind, num_ranks = artifact.info.target_kind, artifact.info.num_ranks
    given = {**given, "mpi": mpi.library, "ranks": num_ranks}
    with cpus_of_rank(mpi, num_ranks, cpus):
        if mpi.rank > 0:
            raise SystemExit(follow_rank(mpi, artifact.pointer, lambda: Device(kind, given)))
        opened = Device(kind, given)
        opened.ranks = MpiRanks(opened)  # which keeps it open as long as the engine asks for failures
        try:
            yield opened
        except BaseException:
            opened.close()
            raise
        finally:
            opened.ranks = None


@contextlib.contextmanager
def device_for(
    artifact: Artifact, device: Device | None, options: Mapping[str, DeviceOption | None]
) -> Iterator[Device]:
    """`device`, or one of the artifact's kind for as long as it takes to make something on it.

    options: of them, those among OPTION_NAMES; a device that is open has its own. Raises LlmcError and TypeError.
    """
    kind = artifact.info.target_kind
    names = DEVICE_OPTIONS.get(kind, {})
    given = {names[name]: value for name, value in options.items() if name in names and value is not None}
    if device is None and artifact.info.num_ranks > 1:
        cpus = options.get(RANK_CPUS)
        yield from _of_ranks(artifact, {**_defaults(kind), **given}, None if cpus is None else str(cpus))
        return
    if device is None:
        with Device(kind, given) as opened:
            yield opened
        return
    if given:
        raise TypeError(f"the device is open already and takes no options: open it with {', '.join(given)}")
    yield device
