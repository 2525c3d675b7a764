"""Python bindings of the C ABI: artifacts, devices, the replayer and the engine. Imports neither torch nor tvm."""

from __future__ import annotations

from llmc.graphs_format import PHASES
from llmc.runtime.binding.artifact import Artifact, ArtifactInfo, GraphInfo
from llmc.runtime.binding.devices import WEIGHT_MEMORY, Device, DeviceKind, device_kinds
from llmc.runtime.binding.engine import Engine
from llmc.runtime.binding.events import Event
from llmc.runtime.binding.handle import LlmcError, library, version
from llmc.runtime.binding.replayer import Replayer, ReplayStats
from llmc.runtime.binding.sampling import SamplingParams
from llmc.runtime.binding.statistics import EngineStats

__all__ = [
    "PHASES",
    "WEIGHT_MEMORY",
    "Artifact",
    "ArtifactInfo",
    "Device",
    "DeviceKind",
    "Engine",
    "EngineStats",
    "Event",
    "GraphInfo",
    "LlmcError",
    "ReplayStats",
    "Replayer",
    "SamplingParams",
    "device_kinds",
    "library",
    "version",
]
