"""The server under a storm of good, cut-off and malformed requests, with too small a KV pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from server_load import describe, idle_state, run_storm, server_process

# 48 blocks of 32 tokens: three of the longest sequences, while 16 may run.
_PRESSURE = ("--kv-bytes", "1536KiB", "--max-num-seqs", "16", "--threads", "2", "--debug-endpoints")
_MAX_GROWTH = 0.02


@pytest.mark.parametrize(
    ("num_requests", "concurrency"), [(200, 32), pytest.param(2000, 64, marks=pytest.mark.slow)], ids=["small", "full"]
)
def test_a_storm_leaves_nothing_behind(
    num_requests: int, concurrency: int, english_artifact: Path, tmp_path: Path
) -> None:
    with server_process(english_artifact, tmp_path / "server.log", *_PRESSURE) as server:
        storm = asyncio.run(run_storm(server, num_requests, concurrency))
        state = asyncio.run(idle_state(server))
        print(f"\n{describe(storm, state)}")
        assert storm.wrong == []
        assert sum(storm.kinds.values()) == num_requests
        assert set(storm.kinds) == {"stream", "whole", "leave", "cancel", "bad"}
        # The same request has the same text, whatever ran beside it and however often it was preempted.
        assert {index: texts for index, texts in storm.texts.items() if len(texts) != 1} == {}
        assert max(map(len, storm.texts.values())) == 1
        stats = state["stats"]
        assert state["integrity"] is None
        assert (state["streams"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
        assert stats["num_free_blocks"] == stats["num_blocks"]
        assert stats["num_preemptions"] > 0
        assert stats["num_bucket_misses"] == 0
        if num_requests >= 2000:
            assert storm.rss_growth() <= _MAX_GROWTH
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log, log[-4000:]
