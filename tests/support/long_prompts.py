"""Requests with long prompts, which prefill replicas compute, and what one server answers."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

from support.live_router import Asked, ask_all
from support.server_harness import running_server

_PROMPT = "It is a truth universally acknowledged, that a single man must be in want of a wife. "


def requests(first: int) -> list[Asked]:
    """Eight that differ from the first word on; every other one streams."""
    return [
        ("/v1/completions", {"prompt": f"{number}. {_PROMPT * 3}", "max_tokens": 40, "ignore_eos": True, "seed": number,
                             "temperature": 1.0, **({"stream": True} if number % 2 else {})})
        for number in range(first, first + 8)
    ]  # fmt: skip


def alone(artifact: Path, asked: list[Asked]) -> list[dict[str, Any]]:
    """What one server answers."""
    with running_server(artifact) as server:
        return ask_all(server.url, asked)


def total(url: str, name: str) -> float:
    """Sum of a metric over all replicas behind a router. name: a regular expression."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as response:
        return sum(map(float, re.findall(rf"^{name} (\S+)$", response.read().decode(), re.M)))
