"""A prefill and a decode replica behind a router: the same answers as of one server, also when the first is killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import main as cli
from llmc.runtime.router import run
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.spawn import Spawner
from llmc.runtime.server.hand_over_headers import KEY_ENV

from support.live_router import ask_all, routing
from support.long_prompts import alone, requests, total


@pytest.mark.slow
def test_a_prefill_replica_changes_no_answer_alive_or_killed(english_artifact: Path) -> None:
    asked = requests(0) + requests(8)
    wanted = alone(english_artifact, asked)
    flags = ("--spawn", "1", "--spawn-prefill", "1", "--hand-over-chars", "100")
    with routing(*flags, english_artifact) as router:
        router.until_all_ready(2)
        prefill = next(one for one in router.replicas().values() if one["role"] == "prefill")
        assert ask_all(router.url, asked[:8]) == wanted[:8]
        assert router.metric("llmc_router_hand_overs_total") == 8
        assert total(router.url, r'llmc_handovers_total\{replica="[^"]*",direction="received"\}') == 8
        # They are on one host.
        assert total(router.url, r'llmc_handovers_shared_total\{replica="[^"]*"\}') == 8
        answers: list[dict[str, Any]] = []
        client = threading.Thread(target=lambda: answers.extend(ask_all(router.url, asked[8:])))
        client.start()
        with contextlib.suppress(ProcessLookupError):
            os.kill(prefill["pid"], signal.SIGKILL)
        client.join()
        assert answers == wanted[8:]
        assert router.metric("llmc_router_broken_streams_total") == 0
        decode = next(one for one in router.replicas().values() if one["role"] == "decode")
        assert decode["requests"] == 16


def test_replicas_alone_have_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not other children of the router, nor a text about its settings."""
    monkeypatch.delenv(KEY_ENV, raising=False)
    routed = list[RouterConfig]()
    monkeypatch.setattr(run, "route", lambda config, **options: routed.append(config))
    assert cli.main(["route", "--spawn", "1", "--spawn-prefill", "1", str(tmp_path)]) == 0
    (config,) = routed
    key = config.hand_over_key
    assert key is not None
    assert KEY_ENV not in os.environ
    assert key not in repr(config)
    code = f"import os, sys; print(os.environ[{KEY_ENV!r}], len(os.environ), file=sys.stderr)"

    async def told_by_replicas() -> set[str]:
        lines = set[str]()
        spawner = Spawner(Fleet(config), lines.add)
        for plan in config.spawn:
            spawner.start(dataclasses.replace(plan, command=(sys.executable, "-c", code)))
        async with asyncio.timeout(60):
            while len(lines) < 2:
                await asyncio.sleep(0.01)
        await spawner.close()
        return lines

    assert asyncio.run(told_by_replicas()) == {f"r{number}: {key} {len(os.environ) + 1}" for number in range(2)}
