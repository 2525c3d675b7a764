"""`llmc route`: one endpoint for many replicas."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from llmc.cli.options.numbers import finite
from llmc.units import parse_size

_HELP = """Serve replicas of artifacts behind one endpoint, as OpenAI's API does.

Requests go to the replica that has seen the beginning of their prompt, unless it is busy. A replica that is lost takes
no request with it: a stream goes on at another one, with the bytes that it would have had. SIGTERM and Ctrl+C let
running requests finish. SIGHUP exchanges local replicas for what their paths name by then, one by one.

\b
Examples:
  llmc route --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000
  llmc route --spawn 2 qwen.llmc
  llmc route --spawn 2 qwen.llmc --serve-flags "--kv-bytes 2GiB --threads 4"
"""
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("route", help=_HELP)(route_command)


def route_command(
    artifacts: list[str] = typer.Argument(
        None, metavar="ARTIFACT", help="Artifacts that local replicas serve, with --spawn."
    ),
    replica: list[str] = typer.Option([], metavar="URL", help="Address of a replica; may be repeated."),
    spawn: int = typer.Option(0, min=0, max=256, metavar="N", help="Local replicas of each artifact."),
    serve_flags: str = typer.Option("", metavar="FLAGS", help="Flags of llmc serve for local replicas, as one text."),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0: any that is free."),
    allowed_hosts: list[str] = typer.Option(
        [], metavar="HOST", help="Name that clients may use for this router, as of llmc serve; may be repeated."
    ),
    replica_api_key: str = typer.Option(
        "", envvar="LLMC_API_KEY", metavar="KEY", help="Key that the router shows replicas to learn what they serve."
    ),
    admin_key: str = typer.Option(
        "", envvar="LLMC_ADMIN_KEY", metavar="KEY", help="Key of who may drain, add and update replicas over HTTP."
    ),
    max_inflight: int = typer.Option(256, min=1, metavar="N", help="Requests that a replica is given at once."),
    max_waiting: int = typer.Option(4096, min=0, metavar="N", help="Requests that wait while all have as many."),
    patience: float = typer.Option(60.0, min=0, metavar="S", callback=finite, help="Seconds to wait for a replica."),
    retries: int = typer.Option(16, min=0, metavar="N", help="How often a request may lose its replica."),
    health_interval: float = typer.Option(
        1.0, min=0.05, metavar="S", callback=finite, help="Seconds from look to look."
    ),
    health_timeout: float = typer.Option(
        10.0,
        min=0.1,
        metavar="S",
        callback=finite,
        help="Seconds to answer a look in; twice that, and its requests go elsewhere.",
    ),
    block_chars: int = typer.Option(256, min=16, metavar="N", help="Bytes of a block of a prompt's beginning."),
    load_factor: float = typer.Option(
        1.25,
        min=1,
        metavar="X",
        callback=finite,
        help="Times the mean load up to which prefixes choose.",
    ),
    max_body_size: str = typer.Option("4MiB", metavar="SIZE", help="Largest body of a request."),
    client_timeout: float = typer.Option(
        60.0, min=0, metavar="S", callback=finite, help="Seconds for clients to send, and to read on; 0: no limit."
    ),
    log_level: str = typer.Option("info", metavar="LEVEL", help=f"One of {', '.join(_LOG_LEVELS)}."),
) -> None:
    """Checks the flags and routes until a signal."""
    import logging
    import shlex

    from llmc.runtime.loadgen.http import Address, UrlError
    from llmc.runtime.router.config import RouterConfig, SpawnPlan
    from llmc.runtime.router.run import route
    from llmc.runtime.router.served_process import SERVE

    artifacts = artifacts or []
    if log_level not in _LOG_LEVELS:
        raise typer.BadParameter(f"{log_level!r}: use one of {', '.join(_LOG_LEVELS)}", param_hint="--log-level")
    if bool(artifacts) != bool(spawn):
        given = "artifacts" if artifacts else "--spawn"
        other = "--spawn" if artifacts else "an artifact to serve"
        raise typer.BadParameter(f"{given} without {other}: give both, or neither", param_hint="--spawn")
    if not artifacts and not replica:
        raise typer.BadParameter("no replica: give --replica URL, or --spawn N ARTIFACT", param_hint="--replica")
    try:
        for url in replica:
            Address.parse(url)
        flags = shlex.split(serve_flags)
        body_bytes = parse_size(max_body_size)
    except (UrlError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    doubled = next((url for index, url in enumerate(replica) if url in replica[:index]), None)
    if doubled is not None:
        raise typer.BadParameter(f"{doubled} is given twice: give each replica once", param_hint="--replica")
    for artifact in artifacts:
        if not Path(artifact).exists():
            raise typer.BadParameter(f"{artifact} does not exist: give an artifact", param_hint="ARTIFACT")
    if artifacts and "--threads" not in flags:
        # Replicas that each take all CPUs would stand in one another's way.
        flags += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // (spawn * len(artifacts))))]
    serve = [*SERVE, "--port", "0", "--no-access-log", *flags]
    logging.basicConfig(level=log_level.upper(), format="llmc: %(message)s", stream=sys.stderr)
    config = RouterConfig(
        replicas=tuple(replica),
        spawn=tuple(SpawnPlan(artifact, spawn, tuple(serve)) for artifact in artifacts),
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_hosts),
        replica_key=replica_api_key or None,
        admin_key=admin_key or None,
        max_inflight=max_inflight,
        max_waiting=max_waiting,
        patience_s=patience,
        retries=retries,
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        block_chars=block_chars,
        load_factor=load_factor,
        max_body_bytes=body_bytes,
        client_timeout_s=client_timeout or None,
    )

    def say(line: str) -> None:
        if "[warm-up]" not in line:
            print(line, file=sys.stderr, flush=True)

    route(config, say=say, on_ready=lambda url: say(f"llmc: ready: {url}/v1"))
