"""What the live page shows of all replicas: their states as one, and the timelines of their requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmc.runtime.server.errors import ApiError
from llmc.version import __version__

from .fleet import Fleet
from .replica import Replica
from .upstream import Headers

_MAX_REQUESTS = 100
_MOST_WAIT_S = 1.0  # for a replica: the page asks once a second
_PERCENTS = (50, 95, 99)
Answer = tuple[int, dict[str, Any]]
"""Status and JSON."""


async def live_state(fleet: Fleet, headers: Headers) -> Answer:
    """For GET /v1/llmc/state. headers: the client's, sent to the replicas. Raises ApiError if no replica answers."""
    return await _of_all(fleet, b"/v1/llmc/state?quantiles=true", headers, _is_state, merged_states)


async def live_requests(fleet: Fleet, headers: Headers) -> Answer:
    """For GET /v1/llmc/requests; arguments and errors as in `live_state`."""
    return await _of_all(fleet, b"/v1/llmc/requests", headers, _is_list, merged_requests)


async def _of_all(
    fleet: Fleet,
    target: bytes,
    headers: Headers,
    fits: Callable[[dict[str, Any]], bool],
    merge: Callable[[Mapping[str, dict[str, Any]]], dict[str, Any]],
) -> Answer:
    """Merges the answers of the replicas that are ready, draining ones too; nobody waits for lost or starting ones.

    fits: whether merge can read an answer; one that it cannot, of another version or a foreign server, counts as none.
    Without any answer, gives a refusal, as of a missing API key, back.
    """
    replicas = [one for one in fleet.replicas.values() if one.ready]
    answers = await asyncio.gather(*(_answer(one, target, headers) for one in replicas))
    found = {one.name: given for one, given in zip(replicas, answers, strict=True) if given is not None}
    told = {name: body for name, (status, body) in found.items() if status == 200 and fits(body)}
    if told:
        return 200, merge(told)
    refusals = [answer for answer in found.values() if answer[0] != 200]
    if refusals:
        return refusals[0]
    raise no_replica_answers()


def no_replica_answers() -> ApiError:
    """The answer for what only replicas know, while none of them says it."""
    message = "no replica answers: try again later"
    return ApiError(message, status=503, code="no_replica", headers={"Retry-After": "5"})


async def _answer(replica: Replica, target: bytes, headers: Headers) -> Answer | None:
    answer = await replica.get_within(_MOST_WAIT_S, target, headers)
    if answer is None:
        return None
    try:
        found = json.loads(answer[1])
    except (ValueError, RecursionError):
        return None
    return (answer[0], found) if isinstance(found, dict) else None


def _is_state(body: dict[str, Any]) -> bool:
    """Whether `merged_states` can read it."""
    return (
        _has(body, ready=bool, uptime_s=(int, float), num_requests=int, engine=dict)
        and _has_parts(body, "requests", age_s=(int, float))
        and _has_parts(body, "adapters", name=str)
        and _has_parts(body, "buckets", phase=str, batch=int, seq=int)
        and all(isinstance(one.get("total", 0), int) for one in body["buckets"])
        and isinstance(quantiles := body.get("latency_quantiles", {}), dict)
        and all(isinstance(one, dict) and _has(one, count=int, values=list) for one in quantiles.values())
        and all(one["values"] and _are_numbers(one["values"]) for one in quantiles.values())
    )


def _is_list(body: dict[str, Any]) -> bool:
    """Whether `merged_requests` can read it."""
    return _has(body, complete=bool) and _has_parts(body, "requests", state=str, age_s=(int, float))


def _has(body: dict[str, Any], /, **types: type | tuple[type, ...]) -> bool:
    return all(isinstance(body.get(name), kind) for name, kind in types.items())


def _has_parts(body: dict[str, Any], name: str, /, **types: type | tuple[type, ...]) -> bool:
    parts = body.get(name)
    return isinstance(parts, list) and all(isinstance(part, dict) and _has(part, **types) for part in parts)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def merged_states(states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One state from those of replicas, by name; counters and gauges are sums.

    What is not a number is that of the first replica. `replicas` names those that are counted: between two states that
    differ there, sums tell no rate.
    """
    first, every = next(iter(states.values())), list(states.values())
    requests = [{**one, "replica": name} for name, state in states.items() for one in state["requests"]]
    requests.sort(key=lambda one: -one["age_s"])
    return {
        **{name: value for name, value in first.items() if name != "latency_quantiles"},
        "version": __version__,
        "ready": any(state["ready"] for state in every),
        "uptime_s": min(state["uptime_s"] for state in every),
        "replicas": sorted(states),
        "num_requests": sum(state["num_requests"] for state in every),
        "requests": requests[:_MAX_REQUESTS],
        "latency": _merged_latencies([state.get("latency_quantiles", {}) for state in every]),
        "engine": _summed([state["engine"] for state in every], ()),
        "adapters": _grouped((state["adapters"] for state in every), ("name",)),
        "replan": None,
        "buckets": _grouped((state["buckets"] for state in every), ("phase", "batch", "seq", "total")),
    }


def merged_requests(timelines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One list of requests, newest first; each names its replica."""
    requests = [{**one, "replica": name} for name, found in timelines.items() for one in found["requests"]]
    requests.sort(key=lambda one: (one["state"] == "finished", one["age_s"]))
    return {"complete": all(found["complete"] for found in timelines.values()), "requests": requests}


def _summed(parts: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Sums of the numbers that any part has, by field; and the keys, in which all parts are equal."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in keys:
                sums[name] = value
            elif isinstance(value, (int, float)):
                sums[name] = sums.get(name, 0) + value
    return sums


def _grouped(lists: Iterable[Sequence[dict[str, Any]]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The parts of all lists, those with equal keys summed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for parts in lists:
        for part in parts:
            groups.setdefault(tuple(part.get(key) for key in keys), []).append(part)
    return [_summed(group, keys) for group in groups.values()]


def _merged_latencies(all_quantiles: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Percentiles of the requests of all replicas, from the quantiles of each. Every request has the same weight."""
    names = {name for quantiles in all_quantiles for name in quantiles}
    merged = {}
    for name in sorted(names):
        mine = [quantiles[name] for quantiles in all_quantiles if name in quantiles]
        weighed = sorted((value, one["count"] / len(one["values"])) for one in mine for value in one["values"])
        whole = sum(weight for _, weight in weighed)
        found, passed = {}, 0.0
        wanted = list(_PERCENTS)
        for value, weight in weighed:
            passed += weight
            # Half of the weight lies before the value.
            while wanted and 100 * (passed - weight / 2) >= wanted[0] * whole:
                found[f"p{wanted.pop(0)}"] = value
        merged[name] = found | {f"p{percent}": weighed[-1][0] for percent in wanted}
    return merged
