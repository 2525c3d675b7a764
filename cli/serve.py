"""`llmc serve`: an OpenAI-compatible HTTP server."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.cli.options.device import DeviceFlags
from llmc.cli.options.executor import ExecutorFlags, run_on_ray
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.lora import LORA_HELP, LORA_METAVAR, parse_adapters
from llmc.cli.options.miss_policy import POLICY_HELP, parse_miss_policy, say_bucket_news
from llmc.cli.options.replan import ReplanFlags
from llmc.cli.options.serving import LOG_LEVELS, SERVING
from llmc.cli.options.speculate import DRAFT_HELP, SPECULATE_HELP, SPECULATE_METAVAR, check_speculation
from llmc.cli.options.warm_flags import (
    ORDER_HELP,
    ORDER_METAVAR,
    RATIO_ENV,
    RATIO_HELP,
    REPLAY_S,
    RESERVED_ENV,
    RESERVED_HELP,
    SECONDS_HELP,
    SKIP_ENV,
    UTILIZATION_HELP,
    UTILIZATION_NAMES,
)
from llmc.cli.render.terminal_text import escape_streams, exact
from llmc.output_path import check_outputs
from llmc.runtime.die_with_parent import dying_with_this_process
from llmc.runtime.misses.record import prepare_record
from llmc.runtime.server.hand_over_headers import KEY_ENV
from llmc.units import parse_size

_HELP = """Serve an artifact or a model (downloaded, compiled, cached) over OpenAI's HTTP API.

/ready answers 200 when every graph is warm, or, with --ready-after hot, the graphs that traffic needs most. Nothing
compiles while requests are served; with --miss-policy background or --replan auto, another process compiles. Unknown
costs of graphs are measured at the start if that takes under two seconds on an idle machine. SIGTERM and Ctrl+C let
running requests finish; a second signal ends them at once.

\b
Examples:
  llmc serve qwen.llmc
  llmc serve Qwen/Qwen3-0.6B
  llmc serve qwen.llmc --served-model-name qwen --port 9000 --kv-bytes 2GiB
  llmc serve qwen.llmc --lora medical=adapters/medical --lora legal=adapters/legal
  llmc serve qwen.llmc --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem
"""
# Ctrl-C reaches the child, too; this process reports it.
COMPILES = """import sys
from llmc.cli.entry import EndsAtOnce
with EndsAtOnce():
    from llmc.cli.serve import _compile
sys.exit(_compile(sys.argv[1]))
"""
"""The program of the child that compiles a model, which is its argument."""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("serve", help=_HELP)(serve_command)


@takes_option_groups
def serve_command(
    *,
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    given: Annotated[dict[str, Any], SERVING],
    served_model_name: list[str] = typer.Option([], metavar="NAME", help="Name of the model; repeatable."),
    api_key: list[str] = typer.Option(
        [], envvar="LLMC_API_KEY", metavar="KEY", help="API key that clients must send; repeatable."
    ),
    api_key_file: Path | None = typer.Option(None, metavar="FILE", help="File with API keys, one per line."),
    kv_bytes: str = typer.Option("0", metavar="SIZE", help="Size of the KV pool, such as 2GiB; 0: from the limits."),
    device: DeviceFlags = DeviceFlags(),
    executor: ExecutorFlags = ExecutorFlags(),
    speculate: str | None = typer.Option(None, metavar=SPECULATE_METAVAR, help=SPECULATE_HELP),
    draft: Path | None = typer.Option(None, metavar="ARTIFACT", help=DRAFT_HELP),
    miss_policy: str = typer.Option(
        "larger", metavar=POLICY_HELP, help="How to run a step that no bucket fits; see docs/buckets.md."
    ),
    replan: ReplanFlags = ReplanFlags(),
    memory_utilization: float | None = typer.Option(None, *UTILIZATION_NAMES, metavar="SHARE", help=UTILIZATION_HELP),
    graph_reserved_memory: float | None = typer.Option(None, envvar=RESERVED_ENV, metavar="SHARE", help=RESERVED_HELP),
    graph_prompt_ratio: float | None = typer.Option(None, envvar=RATIO_ENV, metavar="SHARE", help=RATIO_HELP),
    ready_after: str = typer.Option(
        "all",
        metavar="all|hot",
        help="Graphs that must be warm before requests are accepted; the others follow.",
    ),
    warm_order: str = typer.Option(
        "auto",
        "--warm-order",
        "--warmup-order",
        metavar=ORDER_METAVAR,
        help=f"Order of the warm-up; auto: by --warm-trace, else by size.{ORDER_HELP}",
    ),
    warm_trace: Path | None = typer.Option(
        None, metavar="FILE", help="Trace of --record-trace, from which the hot graphs are chosen."
    ),
    warmup_seconds: float = typer.Option(REPLAY_S, min=0, metavar="S", help=SECONDS_HELP),
    skip_warmup: bool = typer.Option(
        False, "--skip-warmup", envvar=SKIP_ENV, help="Accept requests at once; the first ones run on cold graphs."
    ),
    measure_costs: bool | None = typer.Option(
        None,
        "--measure-costs/--no-measure-costs",
        help="Measure the cost of graphs before ready, where `llmc warmup` has not; takes minutes for "
        "many graphs. Default: only if it takes under 2 s on an idle machine.",
    ),
    lora: list[str] = typer.Option([], metavar=LORA_METAVAR, help=LORA_HELP),
) -> None:
    check_words(given)
    _log_as_llmc()
    run_on_ray(executor, model, given["num_threads"], reads_stdin=False)
    policy = parse_miss_policy(miss_policy, model, ready_after)
    replanning = replan.options(policy)
    speculation = check_speculation(speculate, draft)
    logs = {"--access-log-file": given["access_log_file"], "--record-trace": given["record_trace"]}
    check_outputs({}, appended=logs, folders={"--profiler-dir": given["profiler_dir"]})
    if given["record_misses"] is not None:
        prepare_record(given["record_misses"])
    pool_bytes = parse_size(kv_bytes)
    from llmc.runtime.server.api_keys import KeysError, read_keys

    try:
        keys = (*api_key, *(read_keys(api_key_file) if api_key_file is not None else ()))
    except KeysError as error:
        raise typer.BadParameter(str(error)) from error
    if any(not key.strip() for key in keys):
        raise typer.BadParameter("--api-key is empty: give a key, or leave it out to serve without")

    if any(not name.strip() for name in served_model_name):
        raise typer.BadParameter("--served-model-name is empty: give a name, or leave it out to serve the model's own")

    from llmc.cli.options.warm_up import WarmOptions, WarmUpPlanner, budget_options, say, warm_up_progress
    from llmc.model_artifact import given_artifact
    from llmc.model_name import model_name

    names = tuple(served_model_name) or (model_name(model),)
    adapters = parse_adapters(lora, names)
    budget = budget_options(
        *(memory_utilization, graph_reserved_memory, graph_prompt_ratio, pool_bytes),
        max_num_seqs=given["max_num_seqs"],
        num_states=given["num_states"],
    )
    warm = WarmOptions(
        trace=warm_trace,
        strategy=warm_order,
        ready_after=ready_after,
        measure=measure_costs,
        replay_s=warmup_seconds,
        skip=skip_warmup,
        budget=budget,
    )
    os.environ.pop(KEY_ENV, None)  # compilers and ranks do not need the key
    artifact = given_artifact(model) or compile_aside(model)
    device.check(artifact)

    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.hosts import is_loopback
    from llmc.runtime.server.run import serve

    planner = WarmUpPlanner(artifact, warm, device.options(), speculation.draft, given["images"])

    config = ServerConfig(
        artifact=artifact,
        served_model_names=names,
        api_keys=keys,
        device_options={**(planner.budget.device_options if planner.budget is not None else {}), **device.options()},
        speculation=speculation,
        miss_policy=policy,
        replan=replanning,
        kv_bytes=pool_bytes if planner.budget is None else planner.budget.kv_bytes,
        swap_bytes=device.swap_bytes,
        lora=tuple(adapters.items()),
        **given,
    )
    if not keys and not is_loopback(config.host):
        say(f"warning: {config.host} is reachable from other machines and no --api-key is set: anybody may use it")
    if not (artifact / "tokenizer.json").exists():
        say("warning: the artifact has no tokenizer: prompts are token ids, and answers have no text")
    with warm_up_progress(planner) as on_warm_step:
        failure = serve(
            config,
            on_warm_step=on_warm_step,
            plan_warm_up=planner.plan,
            on_listening=lambda url: say(f"listening on {url}, warming up"),
            on_ready=lambda url: say(f"ready: {config.served_model_names[0]} at {url}/v1"),
            on_stopping=say,
            on_bucket_news=say_bucket_news,
        )
    if failure is not None:
        print(f"llmc: error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


def _log_as_llmc() -> None:
    """Warnings of the server look like the other lines of the command."""
    log = logging.getLogger("llmc")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("llmc: %(message)s"))
        log.addHandler(handler)


def check_words(given: Mapping[str, Any]) -> None:
    """Raises BadParameter for a word that its field of the config does not accept."""
    if given["generation_config"] not in ("auto", "none"):
        raise typer.BadParameter(f"--generation-config {given['generation_config']!r} is unknown: use auto or none")
    otlp = given["otlp_endpoint"]
    if otlp is not None and not otlp.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--otlp-endpoint {otlp!r} is not a URL: use OTLP over HTTP, http://HOST:4318")
    level = given["uvicorn_log_level"]
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"--uvicorn-log-level {level!r} is unknown: use one of {', '.join(LOG_LEVELS)}")
    if given["role"] != "both" and given["hand_over_key"] is None:
        raise typer.BadParameter(f"--role {given['role']} needs --hand-over-key: give routers and servers the same one")
    check_parsers(given["tool_call_parser"], given["reasoning_parser"])


def check_parsers(tool: str, reasoning: str) -> None:
    """Raises BadParameter for an unknown parser."""
    from llmc.runtime.server.tools.registry import choose_parsers

    try:
        choose_parsers(tool, reasoning, None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def compile_aside(model: Path) -> Path:
    """The artifact of a model, downloaded and compiled in a child process, so that this one never loads the compiler.

    Raises ModelPathError if it is not a model, or the artifact is collected before it is held, and typer.Exit when the
    compilation failed and has reported why.
    """
    from llmc.held_artifact import hold
    from llmc.model_artifact import ModelPathError, check_model

    check_model(model)
    # A SIGTERM to the server alone ends the compilation, too.
    command = dying_with_this_process([sys.executable, "-P", "-c", COMPILES, str(model)], signal.SIGTERM)
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode != 0:
        raise typer.Exit(child.returncode if child.returncode > 0 else 1)
    artifact = Path(child.stdout.rstrip("\n"))
    if not hold(artifact):
        raise ModelPathError(f"{artifact} was removed as soon as it was compiled: stop `llmc cache gc`, and try again")
    return artifact


def _compile(model: str) -> int:
    """Main function of the child: compiles, and prints the artifact's path."""
    from llmc import artifact_path
    from llmc.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, describe
    from llmc.cli.render.compile_progress import progress_bar

    escape_streams()
    try:
        with progress_bar() as progress:
            print(artifact_path(model, progress), file=exact(sys.stdout))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # last resort of a process, as in main: any error becomes one sentence
        print(f"llmc: error: {describe(error)}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK
