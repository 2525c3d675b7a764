"""Metrics of the router, and those of all replicas with a label `replica`."""

from __future__ import annotations

import asyncio
import re

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from llmc.runtime.server.without_created import WithoutCreated

from .fleet import Fleet
from .upstream import Headers

_MOST_WAIT_S = 2.0  # for a replica: well below what scrapers wait
_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)$")
_SUFFIXES = (b"_bucket", b"_sum", b"_count", b"_total", b"_created", b"_info")


class RouterMetrics:
    """The router's own metrics; `page` adds those of the replicas."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new = self.registry
        self.requests = Counter(
            "llmc_router_requests", "Requests for replicas, by the status of their answer.", ["status"], registry=new
        )
        self.retries = Counter(
            "llmc_router_retries", "Requests given to another replica before a byte was sent.", registry=new
        )
        self.failovers = Counter(
            "llmc_router_failovers", "Streams that went on at another replica after bytes were sent.", registry=new
        )
        self.hand_overs = Counter("llmc_router_hand_overs", "Prompts given to a prefill replica first.", registry=new)
        self.broken = Counter("llmc_router_broken_streams", "Streams that no replica could end.", registry=new)
        self._waiting = Gauge("llmc_router_waiting_requests", "Requests that wait for a replica.", registry=new)
        labels = ["replica"]
        self._ready = Gauge("llmc_router_replica_ready", "1 if the replica takes requests.", labels, registry=new)
        self._active = Gauge("llmc_router_replica_active_requests", "Requests at the replica.", labels, registry=new)
        self._lost = Counter("llmc_router_replica_lost", "Times that the replica was lost.", labels, registry=new)
        self._counted: dict[str, int] = {}

    async def page(self, fleet: Fleet, headers: Headers) -> bytes:
        """Text for Prometheus. headers: the client's, sent to the replicas that are ready.

        A replica that does not answer within _MOST_WAIT_S, or refuses the client's key, is left out; the router's own
        metrics need none.
        """
        self._note(fleet)
        ready = [one for one in fleet.replicas.values() if one.ready]
        answers = await asyncio.gather(*(one.get_within(_MOST_WAIT_S, b"/metrics", headers) for one in ready))
        parts = {one.name: found[1] for one, found in zip(ready, answers, strict=True) if found and found[0] == 200}
        return bytes(generate_latest(WithoutCreated(self.registry))) + merged(parts)

    def _note(self, fleet: Fleet) -> None:
        self._waiting.set(fleet.num_waiting)
        for gauge in (self._ready, self._active):
            gauge.clear()
        for name, replica in fleet.replicas.items():
            self._ready.labels(name).set(replica.ready and not replica.draining)
            self._active.labels(name).set(replica.active)
            self._lost.labels(name).inc(replica.num_lost - self._counted.get(name, 0))
            self._counted[name] = replica.num_lost


def merged(parts: dict[str, bytes]) -> bytes:
    """Merges the texts of several processes: samples get the label `replica` and are grouped by family."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for name, text in parts.items():
        label = b'replica="%s"' % name.replace("\\", "\\\\").replace('"', '\\"').encode()
        for line in text.splitlines():
            if line.startswith(b"# "):
                words = line.split(b" ", 3)
                if len(words) > 2:
                    known = heads.setdefault(words[2], [])
                    if not any(one.split(b" ", 2)[1] == words[1] for one in known):
                        known.append(line)
                    samples.setdefault(words[2], [])
            elif match := _SAMPLE.match(line):
                metric, brace, rest = match.groups()
                labelled = metric + b"{" + label + (b"," + rest if brace and not rest.startswith(b"}") else b"")
                labelled += b"" if brace and not rest.startswith(b"}") else b"}" + rest.removeprefix(b"}")
                samples.setdefault(_family(metric, heads), []).append(labelled)
    lines: list[bytes] = []
    for family, found in samples.items():
        lines += [*heads.get(family, ()), *found]
    return b"".join(line + b"\n" for line in lines)


def _family(metric: bytes, heads: dict[bytes, list[bytes]]) -> bytes:
    if metric in heads:
        return metric
    return next((base for end in _SUFFIXES if (base := metric.removesuffix(end)) in heads), metric)
