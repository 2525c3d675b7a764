"""The configuration of a deployment: arguments of `llmc deploy`, or of the application in a Serve config file."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.runtime.server.hand_over_headers import fault_of_key


class DeployError(ValueError):
    """Invalid arguments, or no usable cluster; one sentence with the remedy."""


@dataclass(frozen=True)
class DeployConfig:
    """artifacts: paths available on every node. Each gets its own replicas, all behind one endpoint.

    min_replicas, max_replicas: per artifact; equal values disable scaling. prefill_replicas: further ones of each
    artifact, which compute long prompts for the others; their number does not change.
    target_load: intended requests per replica, running or waiting.
    kv_high: share of KV blocks in use above which a replica is added.
    down_delay_s: how long fewer replicas must have sufficed before one is removed.
    cpus, gpus: per replica. 0 CPUs means `--threads` in serve_flags, or 1.
    serve_flags: of `llmc serve`.
    endpoints: routing processes.
    max_inflight, patience_s, retries, replica_key, hand_over_key, hand_over_chars: as in `llmc route`.
    stop_s: time for a replica to finish its requests.
    """

    artifacts: tuple[str, ...]
    min_replicas: int = 1
    max_replicas: int = 1
    prefill_replicas: int = 0
    target_load: float = 16.0
    kv_high: float = 0.9
    down_delay_s: float = 60.0
    cpus: float = 0.0
    gpus: float = 0.0
    serve_flags: tuple[str, ...] = ()
    endpoints: int = 1
    max_inflight: int = 256
    patience_s: float = 60.0
    retries: int = 16
    replica_key: str | None = dataclasses.field(default=None, repr=False)
    hand_over_key: str | None = dataclasses.field(default=None, repr=False)
    hand_over_chars: int = 4096
    stop_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.artifacts:
            raise DeployError("there is no artifact to deploy: give the path that every node has it at")
        doubled = next((one for i, one in enumerate(self.artifacts) if one in self.artifacts[:i]), None)
        if doubled is not None:
            raise DeployError(f"{doubled} is given twice: give each artifact once")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise DeployError(
                f"min_replicas {self.min_replicas} and max_replicas {self.max_replicas} are not a range: "
                "give at least 1, and no fewer at most than at least"
            )
        if self.prefill_replicas < 0:
            raise DeployError(f"prefill_replicas {self.prefill_replicas} is out of range: give 0 or more")
        for name in ("target_load", "endpoints", "stop_s", "hand_over_chars"):
            value = getattr(self, name)
            if not value > 0:
                raise DeployError(f"{name} {value:g} is out of range: give more than 0")
        if self.hand_over_key:  # replicas would end at once, and be started without end
            if not isinstance(self.hand_over_key, str):
                raise DeployError("hand_over_key is not a text: put it in quotes")
            fault = fault_of_key(self.hand_over_key)
            if fault is not None:
                raise DeployError(f"hand_over_key {fault}")
        if not 0 < self.kv_high <= 1:
            raise DeployError(f"kv_high {self.kv_high:g} is out of range: give more than 0 and at most 1")

    def with_key(self) -> DeployConfig:
        """The same, with a new hand_over_key if replicas need one and none is given."""
        if not self.prefill_replicas or self.hand_over_key:
            return self
        return dataclasses.replace(self, hand_over_key=secrets.token_hex(32))

    @property
    def threads(self) -> int | None:
        """Threads per replica set in serve_flags; None if not set."""
        flags = list(self.serve_flags)
        for index, flag in enumerate(flags):
            text = flag.partition("=")[2] if flag.startswith("--threads=") else ""
            if flag == "--threads" and index + 1 < len(flags):
                text = flags[index + 1]
            if text.isdigit():
                return int(text)
        return None

    @property
    def replica_cpus(self) -> float:
        """CPUs that Ray reserves per replica."""
        return self.cpus or float(self.threads or 1)

    def command_flags(self, role: str = "") -> list[str]:
        """Flags of `llmc serve`: as many threads as reserved CPUs, unless serve_flags set them. role: prefill, decode,
        or none."""
        threads = [] if self.threads is not None else ["--threads", str(max(1, int(self.replica_cpus)))]
        return [*self.serve_flags, *threads, *(["--role", role] if role else [])]


def parse_config(given: Mapping[str, Any]) -> DeployConfig:
    """Parses `args` of a Serve config file. Raises DeployError."""
    fields = {field.name: field for field in dataclasses.fields(DeployConfig)}
    unknown = next((name for name in given if name not in fields), None)
    if unknown is not None:
        raise DeployError(f"args has {unknown!r}, which a deployment does not have: use {', '.join(fields)}")
    values = dict(given)
    for name in ("artifacts", "serve_flags"):
        value = values.get(name, ())
        if isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise DeployError(f"{name} is {value!r}: give a list of texts")
        values[name] = tuple(value)
    for name, value in values.items():
        default = fields[name].default
        if isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DeployError(f"{name} is {value!r}: give a number")
        if isinstance(default, int) and not isinstance(value, int):
            raise DeployError(f"{name} is {value!r}: give a whole number")
    return DeployConfig(**values)
