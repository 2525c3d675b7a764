"""A placement group of a Ray cluster with a bundle for each rank. The only module here that imports Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmc.distribution import NAME
from llmc.runtime.die_with_parent import dying_with_this_process
from llmc.runtime.rank_placement.hosts import Host, HostEnd, PlacementError, hosts_of

_NAMESPACE = "llmc"
_HERE_S, _ANYWHERE_S = 10.0, 60.0
"""Time to place rank 0 on this node, and then all ranks anywhere."""
_START_S = 60.0


class RankHolder:
    """An actor that holds a rank's bundle. The first of a host runs the host's command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def place(self) -> tuple[str, list[str]]:
        """Its node's address, and the GPUs that it has there."""
        return ray.util.get_node_ip_address(), [str(number) for number in ray.get_gpu_ids()]

    def start(self, command: Sequence[str], gpus: Sequence[str]) -> str:
        """Starts a command with these GPUs; returns why that is impossible, or nothing."""
        if shutil.which(command[0]) is None:
            return f"there is no {command[0]}: install the same MPICH there"
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        self._process = subprocess.Popen(
            dying_with_this_process(command), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", env={**os.environ, **own},
        )  # fmt: skip
        return ""

    def end(self) -> tuple[int, str]:
        """Waits for the command to end; returns its exit code and what it wrote to stderr, which is little."""
        assert self._process is not None
        _, text = self._process.communicate()
        return self._process.returncode, text


class RayPlacement:
    """The placement, with an actor in each bundle."""

    def __init__(self, address: str, holders: Sequence[Any]) -> None:
        self.address = address
        self._holders = holders
        try:
            places = ray.get([holder.place.remote() for holder in holders], timeout=_START_S)
        except RayError as error:
            raise PlacementError(
                f"ranks cannot start on the Ray cluster: {_in_a_line(error)}; every node needs the same {NAME}[ray]"
            ) from None
        self._gpus = [gpus for _, gpus in places]
        self.hosts: Sequence[Host] = hosts_of([at for at, _ in places], address)
        self._running: dict[Any, Host] = {}
        self._ended: dict[Host, HostEnd] = {}

    def start(self, host: Host, command: Sequence[str]) -> None:
        holder = self._holders[host.bundles[0]]
        gpus = [gpu for bundle in host.bundles for gpu in self._gpus[bundle]]
        try:
            why = ray.get(holder.start.remote(list(command), gpus), timeout=_START_S)
        except RayError as error:
            why = _in_a_line(error)
        if why:
            raise PlacementError(f"{host.ranks} cannot start on {host.address}: {why}")
        self._running[holder.end.remote()] = host

    def ended(self, within_s: float) -> Mapping[Host, HostEnd]:
        done, _ = ray.wait(list(self._running), timeout=within_s) if self._running else ([], [])
        for reference in done:
            try:
                code, text = ray.get(reference)
                end = HostEnd()
                if code:
                    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    end = HostEnd(f"the proxy of mpiexec was {how}: {' '.join(text.split()) or 'no message'}", code < 0)
            except RayError as error:
                end = HostEnd(f"Ray has lost the node, or its worker there: {_in_a_line(error)}", lost=True)
            self._ended[self._running.pop(reference)] = end
        return self._ended


@contextlib.contextmanager
def ray_placement(num_ranks: int, *, cpus: int, gpus: int, spread: bool) -> Iterator[RayPlacement]:
    """Reserves CPUs and GPUs for each rank on the cluster of this machine or of RAY_ADDRESS, until the block ends.

    Rank 0 is on this node if that has enough CPUs. spread: ranks are on as many nodes as possible, else on as few.
    Raises PlacementError.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise PlacementError(
            f"RAY_ADDRESS {os.environ['RAY_ADDRESS']!r} is of a client, whose machine ranks may not reach: "
            "run the command on a node of the cluster"
        )
    try:
        ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(
            f"there is no Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS ({_in_a_line(error)})"
        ) from None
    try:
        own = next(node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
        each = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        fits = all(own["Resources"].get(name, 0.0) >= count for name, count in each.items())
        group = _group(num_ranks, each, "SPREAD" if spread else "PACK", own if fits else None)
        try:
            yield RayPlacement(
                str(own["NodeManagerAddress"]), [_holder(group, rank, each) for rank in range(num_ranks)]
            )
        finally:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
    finally:
        ray.shutdown()


def _group(num_ranks: int, each: Mapping[str, float], strategy: str, here: Mapping[str, Any] | None) -> PlacementGroup:
    """A placed group of a bundle `each` for every rank, with rank 0 on the node `here`, if there is room in time.
    Raises PlacementError."""
    tries = [] if here is None else [({f"node:{here['NodeManagerAddress']}": 0.001}, _HERE_S)]
    for where, seconds in (*tries, ({}, _ANYWHERE_S)):
        group = placement_group([{**each, **where}, *([dict(each)] * (num_ranks - 1))], strategy=strategy)
        placed = False
        try:
            placed = group.wait(seconds)
        finally:
            if not placed:
                remove_placement_group(group)
        if placed:
            return group
    wanted = " and ".join(f"{count:g} {name}s" for name, count in each.items())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = ", ".join(" and ".join(f"{node.get(name, 0):g} {name}s" for name in each) for node in nodes)
    raise PlacementError(
        f"the Ray cluster had no room for {num_ranks} ranks of {wanted} within {_ANYWHERE_S:g} s: its nodes have "
        f"{have}; give fewer --threads, or add nodes"
    )


def _holder(group: PlacementGroup, bundle: int, each: Mapping[str, float]) -> Any:
    """The actor of a bundle, with all that the bundle has."""
    return (
        ray.remote(RankHolder)
        .options(
            num_cpus=each["CPU"],
            num_gpus=each.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
    )


def _in_a_line(error: Exception) -> str:
    """The first sentence of a message of Ray, which may have many lines."""
    return str(error).strip().partition("\n")[0].rstrip(".")
