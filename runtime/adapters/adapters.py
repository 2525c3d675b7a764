"""The adapters of an engine, by name: loads them into its slots and unloads them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.manifest import read_manifest
from llmc.peft_format import in_layer
from llmc.runtime.binding import Artifact, LlmcError
from llmc.runtime.binding.adapter_matrices import AdapterMatrix
from llmc.shown import shown

from .peft import Changes, LowRank, read_adapter
from .places import (
    OUTPUT,
    Place,
    is_output,
    matrices_of_experts,
    of_all_experts,
    of_experts,
    of_layer,
    parts_of_experts,
    places_of,
)
from .tensors import AdapterError

_EXPERTS = ".experts."


class LoadedError(AdapterError):
    """An adapter with this name is already loaded."""


class UnknownAdapterError(AdapterError):
    """No adapter has this name."""


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. id: the engine's number. rank: the largest of its matrices."""

    name: str
    path: Path
    id: int
    rank: int


class Adapters:
    """The adapters of one engine, which may be stepping; thread-safe."""

    def __init__(self, path: Path, artifact: Artifact, engine: Any) -> None:
        """path: of the artifact."""
        self._path, self._artifact, self._engine = path, artifact, engine
        self._places: dict[str, tuple[Place, ...]] | None = None
        self._loaded: dict[str, Adapter] = {}
        self._requests: dict[int, int] = {}
        self._lock, self._loading = threading.Lock(), threading.Lock()

    @property
    def slots(self) -> int:
        """Number of adapters that can be loaded at once; 0 if the artifact takes none."""
        return int(self._artifact.info.adapter_slots)

    def all(self) -> list[Adapter]:
        """The loaded adapters, oldest first."""
        with self._lock:
            return list(self._loaded.values())

    def find(self, name: str) -> Adapter | None:
        """The adapter called `name`; None if it is not loaded."""
        with self._lock:
            return self._loaded.get(name)

    def count(self, number: int) -> None:
        """Counts a request for the adapter with this number."""
        with self._lock:
            if any(adapter.id == number for adapter in self._loaded.values()):
                self._requests[number] = self._requests.get(number, 0) + 1

    def requests(self) -> dict[str, int]:
        """Requests per adapter since it was loaded."""
        with self._lock:
            return {name: self._requests.get(adapter.id, 0) for name, adapter in self._loaded.items()}

    def id_of(self, name: str | None) -> int:
        """The engine's number of an adapter; 0 for none. Raises UnknownAdapterError."""
        if name is None:
            return 0
        found = self.find(name)
        if found is None:
            raise self._unknown(name)
        return found.id

    def load(self, name: str, path: Path) -> Adapter:
        """Loads an adapter into a slot. Raises AdapterError, and then changes nothing.

        Steps continue meanwhile. Requests find the adapter only once it is loaded.
        """
        if not name:
            raise AdapterError("the name of an adapter is empty; give it one")
        if self.slots == 0:
            raise AdapterError(f"{self._path} takes no adapters; compile the model with --lora-slots")
        # One load at a time; lookups do not wait for it.
        with self._loading:
            known = self.all()
            if any(adapter.name == name for adapter in known):
                raise LoadedError(f"the adapter {shown(name)} is loaded already; unload it first")
            lora = self._lora()
            changes = read_adapter(path, matrices_of_experts(lora), lora.get("unread", ()))
            rank, matrices = changes.rank, list(self._matrices(path, changes))
            if len(known) >= self.slots:
                names = ", ".join(adapter.name for adapter in known)
                full = f"every slot of {self.slots} has an adapter ({names})"
                raise AdapterError(f"{full}; unload one, or compile with more --lora-slots")
            try:
                number = int(self._engine.load_adapter(matrices))
            except LlmcError as error:
                # Requests may still use an adapter that was unloaded.
                raise AdapterError(str(error)) from None
            adapter = Adapter(name, path, number, rank)
            with self._lock:
                self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """New requests no longer find the adapter; running ones finish with it. Raises UnknownAdapterError."""
        with self._lock:
            adapter = self._loaded.pop(name, None)
            if adapter is not None:
                self._requests.pop(adapter.id, None)
        if adapter is None:
            raise self._unknown(name)
        self._engine.unload_adapter(adapter.id)

    def _unknown(self, name: str) -> UnknownAdapterError:
        known = ", ".join(adapter.name for adapter in self.all()) or "none"
        return UnknownAdapterError(f"there is no adapter {shown(name)}; loaded: {known}")

    def _matrices(self, path: Path, changes: Changes) -> Iterable[AdapterMatrix]:
        places = self._module_places()
        experts: dict[tuple[int, int], list[tuple[Place, LowRank]]] = {}
        for module, change in changes.layers.items():
            # Checkpoints may omit the name prefix of the trained class, or have another.
            found = places.get(module) or places.get(module.partition(".")[2]) or places.get(in_layer(module))
            if found is None:
                raise AdapterError(f"{path}: {shown(module)} {self._why_without(module)}")
            shape, wanted = (len(change.b), change.a.shape[1]), found[0].module_shape
            if shape != wanted:
                raise AdapterError(
                    f"{path}: {shown(module)} is for a layer of {shape[0]} by {shape[1]}, and the model's is "
                    f"{wanted[0]} by {wanted[1]}; give the model that the adapter was made for"
                )
            self._check_rank(path, module, change.rank)
            for place in found:
                if place.experts:
                    experts.setdefault((place.linear, place.part), []).append((place, change))
                else:
                    yield of_layer(place, change)
        yield from map(of_experts, experts.values())
        parts_of = parts_of_experts(self._lora()) if changes.experts else {}
        while changes.experts:
            of_all, scale = changes.experts.pop()  # its numbers go once they are expanded
            self._check_rank(path, of_all.parameter, of_all.rank)
            parts = parts_of[of_all.of.key]
            if any((place.linear, place.part) in experts for place in parts):
                raise AdapterError(f"{path} changes {shown(of_all.parameter)} twice; save the adapter again")
            yield from of_all_experts(parts, of_all, scale)

    def _check_rank(self, path: Path, module: str, rank: int) -> None:
        most = int(self._artifact.info.adapter_rank)
        if rank > most:
            raise AdapterError(
                f"{path}: {shown(module)} has rank {rank}, and the artifact takes up to {most}; compile it with "
                f"--lora-rank {rank}"
            )

    def _why_without(self, module: str) -> str:
        """Why a module takes no adapters, and what to do."""
        merge = "merge the adapter when you compile, with --merge-lora"
        linears = self._lora().get("left_out", ())
        left_out = {part["module"] for linear in linears for part in linear["parts"]}
        left_out |= {OUTPUT} if any(map(is_output, linears)) else set()
        if module in left_out or module.partition(".")[2] in left_out:
            return (
                "takes no adapters in this artifact, whose slots would be more than kernels count; compile it with "
                f"fewer --lora-slots or a lower --lora-rank, or {merge}"
            )
        other_way = "compile it with --lora-experts, or " if _EXPERTS in module else ""
        return f"is not a layer of this artifact that takes adapters at run time; {other_way}{merge}"

    def _lora(self) -> Mapping[str, Any]:
        """The manifest's record of adapters."""
        return read_manifest(self._path).get("lora") or {"linears": [], "orders": []}

    def _module_places(self) -> dict[str, tuple[Place, ...]]:
        """The places of each module that adapters may change, read from the manifest on first use."""
        if self._places is None:
            self._places = places_of(self._lora())
            self._places |= {name: found for module, found in self._places.items() if (name := in_layer(module))}
        return self._places
