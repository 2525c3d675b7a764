"""A prefill and a decode replica behind a router: the same answers as of one server, also when the first is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

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
