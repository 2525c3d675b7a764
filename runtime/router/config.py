"""Every setting of the router, one field per flag of `llmc route`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpawnPlan:
    """Local replicas of one artifact. command: serves an artifact on a free port; the path is appended. Replicas of
    another role have a plan of their own.

    artifact: its path as given, resolved again at every start, so that a link may name another artifact at an update.
    environment: variables besides those of this process; no representation shows them, as one is a key.
    """

    artifact: str
    count: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RouterConfig:
    """Checked by the command line; times in seconds, sizes in bytes.

    replicas: URLs of servers started elsewhere. replica_key: API key that the router sends to them. admin_key: key for
    clients of the endpoints that change something; without one these endpoints do not exist. max_inflight: concurrent
    requests per replica. max_waiting: requests that wait here while all replicas are full. patience_s: longest wait of
    a request for a replica. retries: times a request is given to another replica. health_interval_s: time between two
    health checks. health_timeout_s: time in which a healthy replica answers; after twice that its requests move
    elsewhere. block_chars: characters per block of a prompt; requests are routed by their leading blocks. load_factor:
    load, relative to the average, up to which a replica is preferred for a prefix it has seen.
    hand_over_key: key that servers of a role ask for; None: prefill servers are not used. hand_over_chars: bytes of the
    shortest prompt that a prefill server computes. drain_timeout_s: time for running requests after a signal; None: no
    limit.
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
    hand_over_key: str | None = field(default=None, repr=False)
    hand_over_chars: int = 4096
    max_body_bytes: int = 4 << 20
    client_timeout_s: float | None = 60.0
    drain_timeout_s: float | None = 30.0
    uvicorn_log_level: str = "warning"
