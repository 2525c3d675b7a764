"""Devices that run artifacts, through the C ABI: the available kinds, and an opened device."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

from llmc.cache_root import cache_root
from llmc.cuda_loader import cuda_library, nccl_library
from llmc.mpi_loader import MpiRank, mpi_rank
from llmc.opencl_loader import opencl_library
from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.handle import Handle, call
from llmc.runtime.binding.mpi_ranks import MpiRanks, all_must_start, cpus_of_rank, follow_rank
from llmc.runtime.binding.ranks import LocalRanks, RanksError, is_number, parse_ranks

DeviceOption = str | int | bool


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device in this library: its name in artifacts, and a one-line description."""

    name: str
    summary: str


def device_kinds() -> list[DeviceKind]:
    """All kinds, in order of registration."""
    count = c_uint64()
    call("llmc_device_list_kinds", None, 0, byref(count))
    native = (abi.DeviceKind * max(1, count.value))()
    native[0].struct_size = ctypes.sizeof(abi.DeviceKind)
    call("llmc_device_list_kinds", native, count.value, byref(count))
    return [DeviceKind(kind.name.decode(), kind.summary.decode()) for kind in native[: count.value]]


def _defaults(kind: str) -> dict[str, DeviceOption]:
    """Default options that this process gives a device."""
    if kind == "cuda":
        return {"library": cuda_library(), "nccl_library": nccl_library()}
    return {"library": opencl_library(), "cache": str(cache_root() / "opencl")} if kind == "opencl" else {}


def _text(value: DeviceOption) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


class Device(Handle):
    """An opened device. Engines and replayers made on it remain valid after close()."""

    _destroy = "llmc_device_close"

    def __init__(self, kind: str, options: Mapping[str, DeviceOption] | None = None) -> None:
        """options: of the kind, as listed at llmc_device_open in llmc.h. Raises LlmcError.

        Defaults: for "opencl", library `llmc.opencl_loader.opencl_library()` and a cache folder in llmc's cache
        directory; for "cuda", library `llmc.cuda_loader.cuda_library()`.
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
        """Its identity and capabilities, by name."""
        count = c_uint64()
        call("llmc_device_get_facts", self.pointer, None, 0, byref(count))
        native = (abi.KeyValue * count.value)()
        call("llmc_device_get_facts", self.pointer, native, count.value, byref(count))
        return {fact.key.decode(): fact.value.decode() for fact in native[: count.value]}


WEIGHT_MEMORY = ("auto", "mapped", "copied")
"""Memory from which a CPU reads weights: the mapped file, or huge pages.

"auto" moves large weights to huge pages while running; "copied" does so at once. See llmc.h.
"""
DEVICE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "eager": "eager",
        "num_threads": "threads",
        "pin_threads": "pin",
        "idle_spin_us": "idle_spin_us",
        "weight_memory": "weights",
    },
    "opencl": {
        "eager": "eager",
        "device_number": "device",
        "device_sampling": "sample",
        "graph_mib": "graph_mib",
        "graph_order": "graph_order",
        "graph_prompt_mib": "graph_prompt_mib",
        "offload_mib": "offload_mib",
        "overlap": "overlap",
        "program_cache": "cache",
        "opencl_library": "library",
    },
    "cuda": {
        "eager": "eager",
        "device_number": "device",
        "device_sampling": "sample",
        "graph_mib": "graph_mib",
        "graph_order": "graph_order",
        "graph_prompt_mib": "graph_prompt_mib",
        "offload_mib": "offload_mib",
        "offload_ring_mib": "offload_ring_mib",
        "overlap": "overlap",
        "dependent_launches": "dependent_launches",
        "cuda_library": "library",
        "collective": "collective",
        "nccl_library": "nccl_library",
    },
}
"""Per kind: keyword arguments of engines and replayers that are passed to the device, and the device's names for
them."""
_MOST_STATS = 64  # more than any device has
RANKS = "ranks"
"""Number of ranks, or the CPUs of each, as in `parse_ranks`."""
STEPS_IN_FLIGHT = "steps_in_flight"
"""Steps that an artifact with stages runs at the same time, at most 64; 0 for as many as stages. Changes no result."""
OVERLAP_SUMS = "overlap_sums"
"""Rows from which on a step is cut in two, so that sums of ranks go on beside kernels: "auto" where a measurement says
that it pays, "off", or the number. Changes no result."""
_MOST_OVERLAP_ROWS = 1 << 20
OPTION_NAMES = frozenset(
    {RANKS, STEPS_IN_FLIGHT, OVERLAP_SUMS, *(name for names in DEVICE_OPTIONS.values() for name in names)}
)
"""Options of all kinds. None means the default; an option unknown to the artifact's kind has no effect."""


def _of_rank(
    kind: str, given: Mapping[str, DeviceOption], local_rank: int, local_ranks: int
) -> dict[str, DeviceOption]:
    """Options of the device of one of the ranks on this host. Raises RanksError.

    GPUs are shared out rank by rank, or taken from the list that `device_number` has; a single number is for all ranks.
    """
    options = dict(given)
    if "device" not in DEVICE_OPTIONS.get(kind, {}).values():
        return options
    numbers = str(options.get("device", "")).split(",")
    if len(numbers) not in (1, local_ranks):
        raise RanksError(
            f"device-number {options['device']!r} lists {len(numbers)} GPUs and this host has {local_ranks} ranks: "
            "name one for each"
        )
    if numbers[0]:
        options["device"] = numbers[local_rank % len(numbers)]
    return {**options, "local_rank": local_rank}


def is_other_rank(artifact: Path) -> bool:
    """Whether mpirun started this process as another rank of the artifact than rank 0. Raises LlmcError."""
    mpi = mpi_rank()
    if mpi is None or mpi.rank == 0:
        return False
    with Artifact(artifact) as opened:
        return opened.info.num_ranks > 1


def _of_ranks(artifact: Artifact, given: Mapping[str, DeviceOption], wanted: str | None) -> Iterator[Device]:
    """Rank 0's device. The other ranks run as child processes, or, under mpirun, as processes started by it.

    A process that mpirun started as another rank ends here, when its part is done.
    """
    kind = artifact.info.target_kind
    mpi = mpi_rank()
    if mpi is not None:
        with _started_by_mpi(mpi, artifact, given, wanted) as opened:
            yield opened
        return
    num_ranks = artifact.info.num_ranks
    by_rank = [_of_rank(kind, given, rank, num_ranks) for rank in range(num_ranks)]
    ranks = LocalRanks(num_ranks, wanted)
    with Device(kind, {**by_rank[0], **ranks.options(0)}) as opened:
        ranks.start(artifact.path, kind, [{name: _text(value) for name, value in one.items()} for one in by_rank])
        opened.ranks = ranks
        ranks.bind()
        try:
            yield opened
        finally:
            ranks.unbind()


@contextlib.contextmanager
def _started_by_mpi(
    mpi: MpiRank, artifact: Artifact, given: Mapping[str, DeviceOption], wanted: str | None
) -> Iterator[Device]:
    """Raises SystemExit in a process that is not rank 0, when its part is done."""
    kind, num_ranks = artifact.info.target_kind, artifact.info.num_ranks
    given = {**_of_rank(kind, given, mpi.local_rank, mpi.local_ranks), "mpi": mpi.library, "ranks": num_ranks}

    def started() -> Device:
        with all_must_start(mpi):
            return Device(kind, given)

    with cpus_of_rank(mpi, num_ranks, wanted):
        if mpi.rank > 0:
            raise SystemExit(follow_rank(mpi, artifact.pointer, started))
        opened = started()
        opened.ranks = MpiRanks(opened)  # keeps it open while the engine queries failures
        try:
            yield opened
        except BaseException:
            opened.close()
            raise
        finally:
            opened.ranks = None


def overlap_rows(wanted: DeviceOption | None) -> int | None:
    """What `OVERLAP_SUMS` asks for: a number of rows, 0 for "off", None for "auto". Raises RanksError."""
    text = "auto" if wanted is None else str(wanted)
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not is_number(text) or not 2 <= int(text) <= _MOST_OVERLAP_ROWS:
        raise RanksError(f"overlap-sums {text!r} is no number of rows: give 2 to {_MOST_OVERLAP_ROWS}, auto or off")
    return int(text)


@contextlib.contextmanager
def device_for(
    artifact: Artifact, device: Device | None, options: Mapping[str, DeviceOption | None]
) -> Iterator[Device]:
    """`device`, or else a temporary one of the artifact's kind, on which something can be made.

    options: those among OPTION_NAMES; not allowed for an open device. Raises LlmcError, RanksError or TypeError.
    """
    kind = artifact.info.target_kind
    names = DEVICE_OPTIONS.get(kind, {})
    given = {names[name]: value for name, value in options.items() if name in names and value is not None}
    wanted = None if options.get(RANKS) is None else str(options[RANKS])
    if device is None and artifact.info.num_ranks > 1:
        in_flight = options.get(STEPS_IN_FLIGHT)
        given |= {} if in_flight is None else {"in_flight": in_flight}
        rows = overlap_rows(options.get(OVERLAP_SUMS))
        given |= {} if rows is None else {"overlap_sums": rows}
        yield from _of_ranks(artifact, {**_defaults(kind), **given}, wanted)
        return
    if wanted is not None:
        parse_ranks(wanted, 1)
    if device is None:
        with Device(kind, given) as opened:
            yield opened
        return
    if given:
        raise TypeError(f"the device is open already and takes no options: open it with {', '.join(given)}")
    yield device


def device_stats(function: str, pointer: c_void_p) -> dict[str, int]:
    """What a function of the library says that a device counts, by the device's names."""
    native, count = (abi.DeviceStat * _MOST_STATS)(), c_uint64()
    native[0].struct_size = ctypes.sizeof(abi.DeviceStat)
    call(function, pointer, native, len(native), byref(count))
    return {stat.name.decode(): stat.value for stat in native[: count.value]}
