"""`llmc deploy`: replicas on a Ray cluster, behind one endpoint."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.hand_over import hand_over_key
from llmc.cli.options.numbers import finite
from llmc.cli.serve_flags import serve_flags
from llmc.runtime.deploy.config import DeployConfig, DeployError
from llmc.runtime.server.hand_over_headers import KEY_ENV

_HELP = """Serve replicas of artifacts on a Ray cluster, behind one endpoint with OpenAI's HTTP API.

Ray places replicas on nodes with enough CPUs or GPUs, restarts lost ones, and adds replicas while requests wait. The
endpoint is the router of llmc route: if a replica is lost, another one continues its requests. To deploy another
artifact, run the command again with the same --name: replicas are replaced one by one.

\b
Examples:
  llmc deploy qwen.llmc --replicas 2
  llmc deploy qwen.llmc --replicas 1 --max-replicas 4 --cpus-per-replica 8
  llmc deploy /models/qwen.llmc --address auto --keep
  llmc deploy qwen.llmc --replicas 2 --prefill-replicas 1
"""


DEPLOYING = ConfigFlags(
    DeployConfig,
    min_replicas=Flag("Fewest replicas of each artifact.", name="replicas", min=1, max=4096, metavar="N"),
    prefill_replicas=Flag(
        "Further replicas of each artifact, which compute long prompts.", min=0, max=4096, metavar="N"
    ),
    target_load=Flag("Intended requests per replica.", min=0.01, metavar="X", callback=finite),
    kv_high=Flag(
        "Share of used KV blocks above which a replica is added.", min=0.01, max=1, metavar="X", callback=finite
    ),
    down_delay_s=Flag(
        "Seconds of low load before a replica is removed.",
        name="down_delay",
        min=0,
        metavar="S",
        callback=finite,
    ),
    cpus=Flag(
        "CPUs per replica; 0: --threads of --serve-flags, else 1.",
        name="cpus_per_replica",
        min=0,
        metavar="N",
        callback=finite,
    ),
    gpus=Flag("GPUs per replica.", name="gpus_per_replica", min=0, metavar="N", callback=finite),
    serve_flags=Flag(
        "Flags of llmc serve for replicas, as one text.", default="", given=str, read=serve_flags, metavar="FLAGS"
    ),
    endpoints=Flag("Router processes on the head node.", min=1, max=256, metavar="N"),
    max_inflight=Flag("Requests that a replica gets at once.", min=1, metavar="N"),
    patience_s=Flag("Seconds to wait for a replica.", name="patience", min=0, metavar="S", callback=finite),
    retries=Flag("Replicas that one request may lose.", min=0, metavar="N"),
    replica_key=Flag(
        "API key of the replicas, if they need one.", name="replica_api_key", envvar="LLMC_API_KEY", metavar="KEY"
    ),
    hand_over_key=Flag(
        "Key with which replicas hand prompts over; default: one is made for --prefill-replicas.",
        envvar=KEY_ENV,
        read=hand_over_key,
        metavar="KEY",
    ),
    hand_over_chars=Flag("Shortest prompt, in bytes, that a prefill replica computes.", min=1, metavar="N"),
)


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("deploy", help=_HELP)(deploy_command)


@takes_option_groups
def deploy_command(
    *,
    artifacts: list[str] = typer.Argument(
        metavar="ARTIFACT", help="Artifacts to serve, at a path that exists on every node."
    ),
    given: Annotated[dict[str, Any], DEPLOYING],
    max_replicas: int = typer.Option(
        0, min=0, max=4096, metavar="N", help="Most replicas of each artifact; 0: as many as --replicas."
    ),
    name: str = typer.Option("llmc", metavar="NAME", help="Name of the deployment in its cluster."),
    address: str = typer.Option("", metavar="ADDRESS", help="Address of the Ray cluster; default: start one here."),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: every address."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
    keep: bool = typer.Option(False, "--keep", help="Return and leave it deployed; otherwise Ctrl+C ends it."),
) -> None:
    """Checks the flags and deploys until a signal."""
    try:
        most = max_replicas or given["min_replicas"]
        config = DeployConfig(artifacts=tuple(artifacts), max_replicas=most, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if keep and not address:
        raise typer.BadParameter(
            "a cluster that this command starts ends with it: give the --address of one that stays", param_hint="--keep"
        )
    try:
        from llmc.runtime.deploy.run import deploy
    except ImportError as error:
        raise typer.BadParameter(
            f"Ray Serve cannot be imported ({error}): install llmc's extra `ray`, or use llmc route",
            param_hint="deploy",
        ) from error

    def on_ready(url: str) -> None:
        print(f"llmc: ready: {', '.join(artifacts)} at {url}/v1", file=sys.stderr, flush=True)

    try:
        deploy(name, config, address=address or None, host=host, port=port, keep=keep, on_ready=on_ready)
    except DeployError as error:
        raise typer.BadParameter(str(error)) from error
