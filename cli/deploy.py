"""`llmc deploy`: replicas on a Ray cluster, behind one endpoint."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.numbers import finite
from llmc.runtime.deploy.config import DeployConfig, DeployError

_HELP = """Serve replicas of artifacts on a Ray cluster, behind one endpoint, as OpenAI's API does.

Ray places replicas on nodes that have the CPUs or GPUs. It starts lost ones anew, and has more of them while requests
wait. The endpoint is the router of llmc route: a replica that is lost takes no request with it. To deploy another
artifact, run the command again with the same --name: replicas are exchanged one after the other.

\b
Examples:
  llmc deploy qwen.llmc --replicas 2
  llmc deploy qwen.llmc --replicas 1 --max-replicas 4 --cpus-per-replica 8
  llmc deploy /models/qwen.llmc --address auto --keep
"""


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


DEPLOYING = ConfigFlags(
    DeployConfig,
    min_replicas=Flag("Replicas of each artifact; the fewest.", name="replicas", min=1, max=4096, metavar="N"),
    target_load=Flag("Requests that a replica is meant to have.", min=0.01, metavar="X", callback=finite),
    kv_high=Flag("Share of KV blocks above which replicas are too few.", min=0.01, max=1, metavar="X", callback=finite),
    down_delay_s=Flag(
        "Seconds that fewer must have been enough before one goes.",
        name="down_delay",
        min=0,
        metavar="S",
        callback=finite,
    ),
    cpus=Flag(
        "CPUs of a replica; 0: as --threads of --serve-flags, or 1.",
        name="cpus_per_replica",
        min=0,
        metavar="N",
        callback=finite,
    ),
    gpus=Flag("GPUs of a replica.", name="gpus_per_replica", min=0, metavar="N", callback=finite),
    serve_flags=Flag(
        "Flags of llmc serve for replicas, as one text.", default="", given=str, read=_words, metavar="FLAGS"
    ),
    endpoints=Flag("Processes that route, on the head node.", min=1, max=256, metavar="N"),
    max_inflight=Flag("Requests that a replica is given at once.", min=1, metavar="N"),
    patience_s=Flag("Seconds to wait for a replica.", name="patience", min=0, metavar="S", callback=finite),
    retries=Flag("How often a request may lose its replica.", min=0, metavar="N"),
    replica_key=Flag(
        "Key that replicas ask for, if they do.", name="replica_api_key", envvar="LLMC_API_KEY", metavar="KEY"
    ),
)


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("deploy", help=_HELP)(deploy_command)


@takes_option_groups
def deploy_command(
    *,
    artifacts: list[str] = typer.Argument(
        metavar="ARTIFACT", help="Artifacts to serve, at a path that every node has."
    ),
    given: Annotated[dict[str, Any], DEPLOYING],
    max_replicas: int = typer.Option(0, min=0, max=4096, metavar="N", help="The most; 0: as many as --replicas."),
    name: str = typer.Option("llmc", metavar="NAME", help="Name of the deployment in its cluster."),
    address: str = typer.Option("", metavar="ADDRESS", help="Of the cluster, as Ray takes it; else one starts here."),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
    keep: bool = typer.Option(False, "--keep", help="Leave it deployed and return; else Ctrl+C ends it."),
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
