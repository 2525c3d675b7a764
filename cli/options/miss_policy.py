"""--miss-policy and --record-misses of `llmc run` and `llmc serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from llmc.hub_id import hub_id
from llmc.runtime.misses.record import MissRecorder

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM, MissPolicy
    from llmc.runtime.misses.watch import OnMisses
    from llmc.runtime.server.async_engine import AsyncEngine

MISS_POLICIES = ("larger", "split", "background", "error")
POLICY_HELP = "|".join(MISS_POLICIES)


def check_miss_policy(policy: str, model: Path, ready_after: str = "all") -> None:
    """Raises BadParameter for an unknown policy, and for what the strict one excludes."""
    if policy not in MISS_POLICIES:
        raise typer.BadParameter(f"--miss-policy {policy!r} is unknown: use {', '.join(MISS_POLICIES)}")
    is_model = hub_id(model) is not None or (model / "config.json").is_file()
    if policy == "error" and is_model and not (model / "graphs.bin").is_file():
        raise typer.BadParameter(
            f"--miss-policy error compiles nothing and {model} is no artifact: compile it first, llmc compile {model} "
            "-o OUT"
        )
    if policy == "background":
        from llmc import require_compiler

        require_compiler("--miss-policy background compiles what traffic lacks")
    if policy == "error" and ready_after != "all":
        raise typer.BadParameter(
            f"--ready-after {ready_after} takes requests while graphs are missing, but --miss-policy error fails them: "
            "use --ready-after all"
        )


def engine_policy(policy: str) -> MissPolicy:
    """What the engine does with a miss of a policy that was checked; the background is this process's."""
    return "larger" if policy == "background" else cast("MissPolicy", policy)


@contextmanager
def miss_observers(engine: AsyncEngine | LLM, policy: str, record: Path | None) -> Iterator[list[OnMisses]]:
    """Who is told of an engine's misses while this lasts: the record, the background compiler."""
    found: list[OnMisses] = []
    block_size = engine.artifact.info.block_size
    if record is not None:
        found.append(MissRecorder(record, lambda: engine.graphs, block_size).take)
    if policy != "background":
        yield found
        return
    from llmc.cli.options.warm_up import say
    from llmc.runtime.misses.background import BackgroundCompiler

    compiler = BackgroundCompiler(
        engine.path, lambda: engine.graphs, engine.add_graphs, block_size=block_size,
        max_model_len=engine.limit.model_tokens, say=say,
    )  # fmt: skip
    try:
        yield [*found, compiler.take]
    finally:
        compiler.close()


@contextmanager
def watch_misses(llm: LLM, policy: str, record: Path | None) -> Iterator[None]:
    """Has the misses of what runs inside recorded, and compiled for."""
    with miss_observers(llm, policy, record) as observers:
        if not observers:
            yield
            return
        from llmc.runtime.misses.watch import MissWatch

        watch = MissWatch(llm.engine, observers)
        try:
            yield
        finally:
            watch.close()
