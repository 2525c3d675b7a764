"""`llmc route`: one endpoint for many replicas."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.hand_over import hand_over_key
from llmc.cli.options.http_limits import DRAIN_TIMEOUT, HTTP_LIMITS
from llmc.cli.options.numbers import finite
from llmc.cli.options.web_names import allowed_hosts
from llmc.cli.serve_flags import serve_flags as words_of
from llmc.runtime.router.config import RouterConfig, SpawnPlan
from llmc.runtime.server.hand_over_headers import KEY_ENV

_HELP = """Serve replicas of artifacts behind one endpoint with OpenAI's HTTP API.

A request goes to the replica that has seen the beginning of its prompt, unless that replica is busy. If a replica is
lost, another one continues its requests with the same bytes. SIGTERM and Ctrl+C let running requests finish, a
second one ends them. SIGHUP replaces local replicas one by one by the artifacts that are then at their paths.

\b
Examples:
  llmc route --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000
  llmc route --spawn 2 qwen.llmc
  llmc route --spawn 2 --spawn-prefill 1 qwen.llmc
  llmc route --spawn 2 qwen.llmc --serve-flags "--kv-bytes 2GiB --threads 4"
"""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


ROUTING = ConfigFlags(
    RouterConfig,
    host=Flag("Address to listen on; 0.0.0.0: every address.", metavar="ADDRESS"),
    port=Flag("Port to listen on; 0: any free one.", min=0, max=65535),
    allowed_hosts=Flag("Accepted Host name, as in llmc serve; repeatable.", read=allowed_hosts, metavar="HOST"),
    replica_key=Flag(
        "API key that the router sends to replicas, to list their models.",
        name="replica_api_key",
        envvar="LLMC_API_KEY",
        metavar="KEY",
    ),
    admin_key=Flag(
        "Admin key, for draining, adding and updating replicas over HTTP.", envvar="LLMC_ADMIN_KEY", metavar="KEY"
    ),
    max_inflight=Flag("Requests that a replica gets at once.", min=1, metavar="N"),
    max_waiting=Flag("Requests that wait while every replica is full.", min=0, metavar="N"),
    patience_s=Flag("Seconds to wait for a replica.", name="patience", min=0, metavar="S", callback=finite),
    retries=Flag("Replicas that one request may lose.", min=0, metavar="N"),
    health_interval_s=Flag(
        "Seconds between two health checks.", name="health_interval", min=0.05, metavar="S", callback=finite
    ),
    health_timeout_s=Flag(
        "Seconds for a health check; after twice that, its requests go to another replica.",
        name="health_timeout",
        min=0.1,
        metavar="S",
        callback=finite,
    ),
    block_chars=Flag("Block size, in bytes, for comparing beginnings of prompts.", min=16, metavar="N"),
    load_factor=Flag(
        "Load, relative to the mean, up to which a replica gets prompts by prefix.", min=1, metavar="X", callback=finite
    ),
    hand_over_key=Flag(
        "Key of servers with a role, as in llmc serve; default: one is made for --spawn-prefill.",
        envvar=KEY_ENV,
        read=hand_over_key,
        metavar="KEY",
    ),
    hand_over_chars=Flag("Shortest prompt, in bytes, that a prefill replica computes.", min=1, metavar="N"),
    **HTTP_LIMITS,
    drain_timeout_s=DRAIN_TIMEOUT,
)


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("route", help=_HELP)(route_command)


@takes_option_groups
def route_command(
    *,
    artifacts: list[str] = typer.Argument(None, metavar="ARTIFACT", help="Artifacts for local replicas, with --spawn."),
    replica: list[str] = typer.Option([], metavar="URL", help="Address of a replica; repeatable."),
    spawn: int = typer.Option(0, min=0, max=256, metavar="N", help="Local replicas of each artifact."),
    spawn_prefill: int = typer.Option(
        0, min=0, max=256, metavar="N", help="Further local replicas of each artifact, which compute long prompts."
    ),
    serve_flags: str = typer.Option("", metavar="FLAGS", help="Flags of llmc serve for local replicas, as one text."),
    given: Annotated[dict[str, Any], ROUTING],
    log_level: str = typer.Option("info", metavar="LEVEL", help=f"One of {', '.join(LOG_LEVELS)}."),
) -> None:
    """Checks the flags and routes until a signal."""
    import logging

    from llmc.runtime.address import UrlError
    from llmc.runtime.router.fleet import Fleet
    from llmc.runtime.router.run import route
    from llmc.runtime.router.served_process import SERVE, without_access_log

    artifacts = artifacts or []
    if log_level not in LOG_LEVELS:
        raise typer.BadParameter(f"{log_level!r}: use one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
    if bool(artifacts) != bool(spawn):
        alone = "artifacts" if artifacts else "--spawn"
        other = "--spawn" if artifacts else "an artifact to serve"
        raise typer.BadParameter(f"{alone} without {other}: give both, or neither", param_hint="--spawn")
    if spawn_prefill and not spawn:
        raise typer.BadParameter("--spawn-prefill without --spawn: prompts are computed for replicas that decode",
                                 param_hint="--spawn-prefill")  # fmt: skip
    if not artifacts and not replica:
        raise typer.BadParameter("no replica: give --replica URL, or --spawn N ARTIFACT", param_hint="--replica")
    flags = [*words_of(serve_flags)]
    try:
        names = [Fleet.name_of(url) for url in replica]
    except UrlError as error:
        raise typer.BadParameter(str(error), param_hint="--replica") from error
    doubled = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if doubled is not None:
        raise typer.BadParameter(f"{doubled} is given twice: give each replica once", param_hint="--replica")
    for artifact in artifacts:
        if not Path(artifact).exists():
            raise typer.BadParameter(f"{artifact} does not exist: give an artifact", param_hint="ARTIFACT")
    if artifacts and "--threads" not in flags:
        # Replicas that each use all CPUs would slow each other down.
        flags += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // ((spawn + spawn_prefill) * len(artifacts))))]
    serve = [*SERVE, "--port", "0", *without_access_log(flags), *flags]
    logging.basicConfig(level=log_level.upper(), format="llmc: %(message)s", stream=sys.stderr)
    if spawn_prefill:
        given["hand_over_key"] = given["hand_over_key"] or secrets.token_hex(32)
    environment = {KEY_ENV: given["hand_over_key"]} if given["hand_over_key"] else {}
    config = RouterConfig(
        replicas=tuple(replica),
        spawn=tuple(
            SpawnPlan(artifact, count, (*serve, "--role", role) if role else tuple(serve), environment)
            for artifact in artifacts
            for role, count in _roles(artifact, spawn, spawn_prefill).items()
        ),
        **given,
    )

    def say(line: str) -> None:
        if "[warm-up]" not in line:
            print(line, file=sys.stderr, flush=True)

    route(
        config,
        say=say,
        on_ready=lambda url: say(f"llmc: ready: {url}/v1"),
        on_stopping=lambda line: say(f"llmc: {line}"),
    )


def _roles(artifact: str, spawn: int, spawn_prefill: int) -> dict[str, int]:
    """Replicas of an artifact by role."""
    from llmc.runtime.router.roles import has_roles

    if not spawn_prefill or not has_roles(Path(artifact)):
        return {"": spawn}
    return {"decode": spawn, "prefill": spawn_prefill}
