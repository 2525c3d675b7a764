"""Cost of HTTP: output tokens/s of `llmc serve` relative to the engine alone, with the same requests.

    python -m bench.serve_overhead ARTIFACT [--streams 16] [--input-len 256] [--output-len 128] [--rounds 5] [--json]

Each round sends the same random prompts through the engine in this process and through a server process. These take
turns in being first, with `streams` requests at once, while the other engine sleeps. Both read weights from huge pages.
The ratio of a round is server over engine; medians and ranges over the rounds are printed. So is the CPU time per token
of client and server beside the engine's. Run it on a quiet machine with two CPUs more than --threads; otherwise allow
for the client's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.address import Address
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.loadgen.drive import drive
from llmc.runtime.loadgen.http import HttpClient
from llmc.runtime.loadgen.load import LoadConfig, run_load
from llmc.runtime.loadgen.measure import Report, report
from llmc.runtime.loadgen.workload import Lengths, RandomTokens

_LLMC = [sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]
_TICK = os.sysconf("SC_CLK_TCK")


@contextmanager
def served(artifact: Path, flags: list[str]) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a ready server; it ends with the block."""
    command = [*_LLMC, "serve", str(artifact), "--port", "0", "--no-access-log", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("llmc: ready: "):
                yield line.strip().split(" at ")[1].removesuffix("/v1"), process.pid
                return
        raise RuntimeError("the server did not get ready: run llmc serve by hand to see why")
    finally:
        process.terminate()
        process.communicate()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def through_server(url: str, requests: RandomTokens, streams: int) -> list[Outcome]:
    async def run() -> list[Outcome]:
        client = HttpClient(Address.parse(url))
        try:
            config = LoadConfig(concurrency=streams, ignore_eos=True, strict=True)
            return await run_load(client, requests, [0.0] * len(requests), config)
        finally:
            await client.close()

    return asyncio.run(run())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    count = arguments.streams * arguments.waves
    lengths = Lengths(np.full(count, arguments.input_len), np.full(count, arguments.output_len))
    flags = ["--threads", str(arguments.threads), "--max-num-seqs", str(arguments.streams), *arguments.serve_flag]
    with (
        Artifact(arguments.artifact) as artifact,
        Engine(
            artifact, num_threads=arguments.threads, max_num_seqs=arguments.streams, weight_memory="copied"
        ) as engine,
        served(arguments.artifact, flags) as (url, pid),
    ):
        longest = artifact.info.max_model_len
        if arguments.input_len + arguments.output_len > longest:
            sys.exit(f"{arguments.input_len} + {arguments.output_len} tokens exceed max-model-len {longest}")
        for number in range(arguments.rounds + 1):
            requests = RandomTokens(lengths, artifact.info.vocab_size, seed=number)
            asks = [requests.ask(i) for i in range(count)]
            found: dict[str, Report] = {}
            engine_s = client_s = server_s = 0.0
            for way in ("engine", "server") if number % 2 else ("server", "engine"):
                mine = time.process_time()
                if way == "engine":
                    found[way] = report(drive(engine, asks, arguments.streams))
                    engine_s = time.process_time() - mine
                    continue
                before = cpu_seconds(pid)
                found[way] = report(through_server(url, requests, arguments.streams))
                client_s, server_s = time.process_time() - mine, cpu_seconds(pid) - before
            if found["server"].failed:
                sys.exit(f"requests failed: {found['server'].failures} {found['server'].examples}")
            if number:  # the first round warms up
                tokens = found["server"].output_tokens
                rounds.append(
                    {
                        "ratio": found["server"].output_tokens_per_s / found["engine"].output_tokens_per_s,
                        "engine_us_per_token": engine_s / tokens * 1e6,
                        "client_us_per_token": client_s / tokens * 1e6,
                        "server_us_per_token": server_s / tokens * 1e6,
                        **{way: one.as_dict() for way, one in found.items()},
                    }
                )
    settings = {name: str(value) for name, value in vars(arguments).items()}
    return {"settings": settings, "cpus": len(os.sched_getaffinity(0)), "rounds": rounds}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--waves", type=int, default=2, help="requests of a round: so many times --streams")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one more warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either engine")
    parser.add_argument("--serve-flag", action="append", default=[], metavar="FLAG", help="more for llmc serve")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    rounds = result["rounds"]
    for way in ("engine", "server"):
        print(f"{way:<8} {spread([one[way]['output_tokens_per_s'] for one in rounds])} output tokens/s, "
              f"TPOT p50 {spread([one[way]['tpot_ms']['p50'] for one in rounds])} ms")  # fmt: skip
    print(f"ratio    {spread([one['ratio'] for one in rounds])} server / engine")
    for who in ("engine", "server", "client"):
        print(f"{who} CPU {spread([one[f'{who}_us_per_token'] for one in rounds])} us an output token")


if __name__ == "__main__":
    main()
