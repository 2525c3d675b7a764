"""The results file: one JSON document, replaced whole after every measurement."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.plan import Key, Settings

FORMAT = 1


class StoreError(Exception):
    """Raised with one sentence: what is wrong with a results file and what to do."""


@dataclass(frozen=True)
class Measurement:
    """value: tok/s (prefill, decode, serve, offline), seconds (start), bytes (memory); None: it failed, see `error`.

    limits: bytes or operations per second by limit, the mean of probes right before and after it. details: further
    facts from the engine. at: seconds since the epoch.
    """

    key: Key
    value: float | None
    limits: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    at: float = 0.0


class Store:
    """Measurements and facts about engines, in memory and in the file `path`.

    Raises StoreError if the file has other settings or is no results file.
    """

    def __init__(self, path: Path, settings: Settings, machine: dict[str, Any]) -> None:
        self.path = path
        self.measurements: list[Measurement] = []
        self.limits: list[dict[str, float]] = []
        """Limits measured at the start of each session, by name."""
        self.reading: list[dict[str, float]] = []
        """Bytes read per second by number of threads, measured at the start of each session."""
        self.engines: dict[str, dict[str, Any]] = {}
        """Facts by engine: versions, install_bytes."""
        self.prepared: dict[str, dict[str, Any]] = {}
        """Facts by "model/engine/variant": weight_bytes, arithmetic, precision."""
        self.skipped: dict[str, str] = {}
        """Reasons for missing measurements, by "engine" or "model/engine/variant"."""
        self.models: dict[str, dict[str, Any]] = {}
        """Sizes of models, by name."""
        self.settings, self.machine = settings, machine
        if path.exists():
            self._read()

    @classmethod
    def load(cls, path: Path) -> Store:
        """Reads a file, whatever its settings. Raises StoreError."""
        if not path.exists():
            raise StoreError(f"{path} does not exist: run the benchmark first")
        document = _document(path)
        return cls(path, Settings.from_dict(document["settings"]), document["machine"])

    def done(self) -> set[Key]:
        """Keys of all measurements, including failed ones."""
        return {one.key for one in self.measurements}

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self.save()

    def save(self) -> None:
        document = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "machine": self.machine,
            "models": self.models,
            "engines": self.engines,
            "prepared": self.prepared,
            "skipped": self.skipped,
            "limits": self.limits,
            "reading": self.reading,
            "measurements": [asdict(one) for one in self.measurements],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(temporary, self.path)

    def _read(self) -> None:
        document = _document(self.path)
        stated = Settings.from_dict(document["settings"])
        for name, wanted in asdict(self.settings).items():
            # A file without measurements, as `install` writes it, may have other settings.
            if getattr(stated, name) != wanted and document["measurements"]:
                raise StoreError(
                    f"{self.path} was measured with {name}={getattr(stated, name)}, not {wanted}: "
                    "give another --folder, or the same settings"
                )
        if document["machine"].get("cpu") != self.machine.get("cpu"):
            raise StoreError(
                f"{self.path} was measured on {document['machine'].get('cpu')!r}, this is "
                f"{self.machine.get('cpu')!r}: give another --folder"
            )
        for name in ("models", "engines", "prepared", "skipped", "limits"):
            setattr(self, name, document[name])
        self.reading = document.get("reading", [])
        self.measurements = [Measurement(**{**one, "key": Key(**one["key"])}) for one in document["measurements"]]


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        if document["format"] == FORMAT:
            return dict(document)
    except (ValueError, KeyError, TypeError):
        pass
    raise StoreError(f"{path} is no results file of format {FORMAT}: give another --folder")
