"""Replicas of several ranks behind `llmc route`: a rank is killed under streams, and no client sees it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model

from support.artifacts import made_once
from support.live_router import Asked, LiveRouter, ask_all, routing
from support.live_server import serving
from support.marks import rare
from support.mpi import Mpi, each_mpi
from support.processes import descendants, gone, until
from support.tiny_models import make_tiny_model
from support.word_tokenizer import save_words

SIZES: dict[str, Any] = {
    "vocab_size": 516, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
SERVE_FLAGS = ("--threads", "1", "--served-model-name", "x", "--skip-warmup")
# Greedy and seeded ones, each as a stream and as a whole answer.
ASKED: list[Asked] = [
    ("/v1/completions", {
        "prompt": f"w5 w6 w7 w{8 + number // 2}", "max_tokens": 300, "ignore_eos": True, "stream": number % 4 < 3,
        **({"temperature": 0} if number % 2 else {"temperature": 1.2, "seed": number, "top_p": 0.95}),
    })
    for number in range(12)
]  # fmt: skip
Parted = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Parted:
    """An artifact of as many ranks a stage, and stages. Its contexts are long enough for streams that last."""

    def made(ranks: int, stages: int) -> Path:
        def make(folder: Path) -> None:
            make_tiny_model(folder / "model", "llama", **SIZES)
            save_words(folder / "model", SIZES["vocab_size"])
            compile_model(
                CompileConfig(
                    model=folder / "model",
                    output=folder / "artifact",
                    cache_dir=kernel_cache,
                    dtype="f32",
                    block_size=16,
                    buckets="prefill=1x32,decode=8x512",
                    jobs=1,
                    tensor_parallel=ranks,
                    pipeline_parallel=stages,
                )
            )

        return made_once(tmp_path_factory, f"routed-{ranks}-{stages}", make) / "artifact"

    return made


def ask_while_a_rank_dies(router: LiveRouter, kill: Callable[[str], None], *names: str) -> list[dict[str, Any]]:
    """The answers. kill: ends a rank of the replica of that name, which is the busiest of `names`."""
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.extend(ask_all(router.url, ASKED)))
    client.start()
    victim = None
    while victim is None and client.is_alive():
        victim = busiest(router, names)
    kill(victim or names[0])
    client.join()
    return answers


def busiest(router: LiveRouter, names: tuple[str, ...]) -> str | None:
    """The replica of the most requests that have tokens; None where none has."""
    state = httpx.get(f"{router.url}/v1/llmc/state", timeout=60).json()
    begun = [one["replica"] for one in state.get("requests", ()) if one["output_tokens"]]
    return max(names, key=begun.count) if set(names) & set(begun) else None


def went_on(router: LiveRouter) -> bool:
    """Whether streams did, at another replica. On a fast machine they may end before a rank is killed: kill another."""
    assert router.metric("llmc_router_broken_streams_total") == 0
    return router.metric("llmc_router_failovers_total") > 0


def rank_one(head: int) -> int:
    """The process of the only other rank of a head."""
    (found,) = (pid for pid in descendants(head) if b"llmc.runtime.follow" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), rare(1, 2)])
def test_a_killed_rank_is_not_seen(parted: Parted, ranks: int, stages: int) -> None:
    """The replica says which rank died, and is started again."""
    flags = " ".join((*SERVE_FLAGS, "--ranks 2"))
    with routing("--spawn", "2", parted(ranks, stages), serve_flags=flags) as router:
        router.until_all_ready(2)
        processes = set(descendants(router.process.pid))
        killed: list[tuple[str, int]] = []

        def kill(name: str) -> None:
            pid = rank_one(router.replicas()[name]["pid"])
            os.kill(pid, signal.SIGKILL)
            killed.append((name, pid))

        wanted = ask_all(router.url, ASKED)
        while not went_on(router):
            assert ask_while_a_rank_dies(router, kill, "r0", "r1") == wanted
            router.until_all_ready(2)
        processes |= set(descendants(router.process.pid))
    for name, pid in killed:
        why = f"Rank 1 of 2 has failed: its process {pid} was killed by signal 9 (SIGKILL); start anew."
        assert f"{name}: llmc: error: the engine failed: {why}\n" in "".join(router.log)
    until(lambda: all(map(gone, processes)))


@pytest.mark.slow
@each_mpi
def test_a_killed_rank_of_mpirun_is_not_seen(parted: Parted, mpi: Mpi) -> None:
    """mpirun ends the replica, and its requests with their connections: they go on at the other replica."""
    artifact = parted(2, 1)
    with serving(artifact, *SERVE_FLAGS, "--ranks", "2") as shared, routing("--replica", shared.url) as router:
        wanted = ask_all(router.url, ASKED)
        while not went_on(router):
            with serving(artifact, *SERVE_FLAGS, launcher=(*mpi.launcher, "-n", "2"), fails=True) as started:
                name = router.admin("/v1/llmc/replicas", url=started.url).json()["name"]
                router.until_all_ready(2)
                processes = descendants(started.process.pid)

                def kill(_: str) -> None:
                    said = re.search(r"rank 1 of 2 is process (\d+)", "".join(started.log))
                    assert said is not None
                    os.kill(int(said[1]), signal.SIGKILL)

                assert ask_while_a_rank_dies(router, kill, name) == wanted
            until(lambda: all(map(gone, processes)))  # noqa: B023
            assert router.admin(f"/v1/llmc/replicas/{name}/remove").status_code == 200
