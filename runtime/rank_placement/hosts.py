"""Which ranks run on which host of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PlacementError(RuntimeError):
    """Ranks cannot be placed or started; one sentence with the remedy."""


@dataclass(frozen=True)
class HostEnd:
    """How a host's command ended. why: of a failure, else "". lost: with its node, rather than by itself."""

    why: str = ""
    lost: bool = False


@dataclass(frozen=True)
class Host:
    """Ranks `first`, `first + 1`, … run at `address`. bundles: one a rank, by number in the placement group."""

    address: str
    first: int
    bundles: tuple[int, ...]

    @property
    def ranks(self) -> str:
        """Its ranks in words, such as "rank 2" or "ranks 0 to 3"."""
        last = self.first + len(self.bundles) - 1
        return f"rank {self.first}" if last == self.first else f"ranks {self.first} to {last}"


def hosts_of(addresses: Sequence[str], own: str) -> list[Host]:
    """Hosts in the order of their ranks; addresses: where each bundle is.

    The host at `own` comes first, so that rank 0 serves there. Ranks of a host are neighbours, which exchange most.
    """
    bundles: dict[str, list[int]] = {}
    for bundle, address in enumerate(addresses):
        bundles.setdefault(address, []).append(bundle)
    hosts: list[Host] = []
    first = 0
    for address in sorted(bundles, key=lambda address: address != own):
        hosts.append(Host(address, first, tuple(bundles[address])))
        first += len(bundles[address])
    return hosts
