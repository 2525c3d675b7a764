"""Every knob of the router, one field a flag of `llmc route`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpawnPlan:
    """Local replicas of one artifact. command: serves an artifact, whose path is appended, on a port that is free.

    artifact: its path as given, looked at anew at every start; a link may so name another artifact at an update.
    """

    artifact: str
    count: int
    command: Sequence[str]


@dataclass(frozen=True)
class RouterConfig:
    """Checked by the command line; times in seconds, sizes in bytes.

    replicas: URLs of servers that somebody else runs. replica_key: the API key that the router itself shows them;
    admin_key: what clients of the endpoints that change something show, none: there are no such endpoints.
    max_inflight: requests that a replica is given at once; max_waiting: that wait here because all have as many.
    patience_s: how long a request waits for a replica. retries: how often it is given to another one.
    health_interval_s: between two looks at a replica; health_timeout_s: what one that is well answers in, twice as long
    and its requests go elsewhere. block_chars: characters of a block of a prompt, by whose leading blocks it is routed.
    load_factor: how far above the average load a replica may be that has seen a prompt's beginning.
    """

    replicas: tuple[str, ...] = ()
    spawn: tuple[SpawnPlan, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    replica_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    max_inflight: int = 256
    max_waiting: int = 4096
    patience_s: float = 60.0
    retries: int = 16
    health_interval_s: float = 1.0
    health_timeout_s: float = 10.0
    block_chars: int = 256
    load_factor: float = 1.25
    max_body_bytes: int = 4 << 20
    client_timeout_s: float | None = 60.0
    uvicorn_log_level: str = "warning"
