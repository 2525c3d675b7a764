"""`llmc deploy`: replicas on a Ray cluster, behind one endpoint."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import sys

import typer

from llmc.cli.options.numbers import finite

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


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("deploy", help=_HELP)(deploy_command)


def deploy_command(
    artifacts: list[str] = typer.Argument(
        metavar="ARTIFACT", help="Artifacts to serve, at a path that every node has."
    ),
    replicas: int = typer.Option(1, min=1, max=4096, metavar="N", help="Replicas of each artifact; the fewest."),
    max_replicas: int = typer.Option(0, min=0, max=4096, metavar="N", help="The most; 0: as many as --replicas."),
    target_load: float = typer.Option(
        16.0, min=0.01, metavar="X", callback=finite, help="Requests that a replica is meant to have."
    ),
    kv_high: float = typer.Option(
        0.9, min=0.01, max=1, metavar="X", callback=finite, help="Share of KV blocks above which replicas are too few."
    ),
    down_delay: float = typer.Option(
        60.0, min=0, metavar="S", callback=finite, help="Seconds that fewer must have been enough before one goes."
    ),
    cpus_per_replica: float = typer.Option(
        0.0, min=0, metavar="N", callback=finite, help="CPUs of a replica; 0: as --threads of --serve-flags, or 1."
    ),
    gpus_per_replica: float = typer.Option(0.0, min=0, metavar="N", callback=finite, help="GPUs of a replica."),
    serve_flags: str = typer.Option("", metavar="FLAGS", help="Flags of llmc serve for replicas, as one text."),
    endpoints: int = typer.Option(1, min=1, max=256, metavar="N", help="Processes that route, on the head node."),
    max_inflight: int = typer.Option(256, min=1, metavar="N", help="Requests that a replica is given at once."),
    patience: float = typer.Option(60.0, min=0, metavar="S", callback=finite, help="Seconds to wait for a replica."),
    retries: int = typer.Option(16, min=0, metavar="N", help="How often a request may lose its replica."),
    replica_api_key: str = typer.Option(
        "", envvar="LLMC_API_KEY", metavar="KEY", help="Key that replicas ask for, if they do."
    ),
    name: str = typer.Option("llmc", metavar="NAME", help="Name of the deployment in its cluster."),
    address: str = typer.Option("", metavar="ADDRESS", help="Of the cluster, as Ray takes it; else one starts here."),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
    keep: bool = typer.Option(False, "--keep", help="Leave it deployed and return; else Ctrl+C ends it."),
) -> None:
    """Checks the flags and deploys until a signal."""
    import shlex

    from llmc.runtime.deploy.config import DeployConfig, DeployError

    try:
        config = DeployConfig(
            artifacts=tuple(artifacts),
            min_replicas=replicas,
            max_replicas=max_replicas or replicas,
            target_load=target_load,
            kv_high=kv_high,
            down_delay_s=down_delay,
            cpus=cpus_per_replica,
            gpus=gpus_per_replica,
            serve_flags=tuple(shlex.split(serve_flags)),
            endpoints=endpoints,
            max_inflight=max_inflight,
            patience_s=patience,
            retries=retries,
            replica_key=replica_api_key or None,
        )
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
