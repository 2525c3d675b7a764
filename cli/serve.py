"""`llmc serve`: an OpenAI-compatible HTTP server."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from llmc.cli.options.device import DeviceFlags
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.lora import LORA_HELP, LORA_METAVAR, parse_adapters
from llmc.cli.options.miss_policy import POLICY_HELP, parse_miss_policy, say_bucket_news
from llmc.cli.options.numbers import finite
from llmc.cli.options.replan import ReplanFlags
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
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory
from llmc.cli.render.terminal_text import escape_streams, exact
from llmc.runtime.misses.record import prepare_record
from llmc.units import parse_size

_HELP = """Serve an artifact or a model (downloaded, compiled, cached) over HTTP, as OpenAI's API does.

Every graph is warm before /ready answers 200, or, with --ready-after hot, the ones that traffic needs most. Graphs are
replayed for some seconds, and those of the same kernels that are left are walked through. Nothing compiles
while requests are served. Costs that are not known are measured on the way where that takes under two seconds of an
idle machine. SIGTERM and Ctrl+C let running requests finish; a second one ends at once.

\b
Examples:
  llmc serve qwen.llmc
  llmc serve Qwen/Qwen3-0.6B
  llmc serve qwen.llmc --served-model-name qwen --port 9000 --kv-bytes 2GiB
  llmc serve qwen.llmc --lora medical=adapters/medical --lora legal=adapters/legal
  llmc serve qwen.llmc --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem
"""
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("serve", help=_HELP)(serve_command)


@takes_option_groups
def serve_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0: any that is free."),
    served_model_name: list[str] = typer.Option([], metavar="NAME", help="Name of the model; may be repeated."),
    api_key: list[str] = typer.Option(
        [], envvar="LLMC_API_KEY", metavar="KEY", help="Key that clients must show; may be repeated."
    ),
    api_key_file: Path | None = typer.Option(None, metavar="FILE", help="File of such keys, one a line."),
    allowed_hosts: list[str] = typer.Option(
        [],
        metavar="HOST",
        help="Name that clients may use for this server, *.NAME, or * for any; may be repeated. Default: any with keys "
        "or on another address than this machine's own, else localhost, 127.0.0.1 and [::1].",
    ),
    allowed_origins: list[str] = typer.Option([], metavar="ORIGIN", help="Web origin for CORS, or *; may be repeated."),
    allowed_methods: list[str] = typer.Option(["*"], metavar="METHOD", help="Methods for CORS."),
    allowed_headers: list[str] = typer.Option(["*"], metavar="HEADER", help="Headers for CORS."),
    allow_credentials: bool = typer.Option(False, "--allow-credentials", help="Credentials for CORS."),
    ssl_certfile: Path | None = typer.Option(None, metavar="FILE", help="TLS certificate (PEM)."),
    ssl_keyfile: Path | None = typer.Option(None, metavar="FILE", help="Its private key (PEM)."),
    max_body_size: str = typer.Option("4MiB", metavar="SIZE", help="Largest body of a request."),
    client_timeout: float = typer.Option(
        60.0, min=0, metavar="S", help="Seconds for a request to arrive, and for an answer to be read on; 0: no limit."
    ),
    generation_config: str = typer.Option("auto", metavar="auto|none", help="Sampling defaults: the model's, or none."),
    chat_template: Path | None = typer.Option(
        None, metavar="FILE", help="Jinja chat template, instead of the model's."
    ),
    tool_call_parser: str = typer.Option(
        "auto", metavar="NAME", help="How the model writes tool calls: auto, none, hermes, qwen, llama3_json, mistral."
    ),
    reasoning_parser: str = typer.Option(
        "auto", metavar="NAME", help="How the model writes its reasoning: auto, none, qwen3, deepseek_r1."
    ),
    max_num_seqs: int = typer.Option(0, min=0, metavar="N", help="Sequences that run at once; 0: the artifact's."),
    max_num_batched_tokens: int = typer.Option(
        0,
        "--max-num-batched-tokens",
        "--prefill-chunk-size",
        min=0,
        metavar="N",
        help="Tokens of a step with prefill, so also of a chunk; 0: the largest graph.",
    ),
    num_threads: int = typer.Option(
        0, "--num-threads", "--threads", min=0, metavar="N", help="Threads; 0: every CPU this process may use."
    ),
    pin: bool = typer.Option(True, "--pin/--no-pin", help="Keep each thread on a CPU of its own."),
    idle_spin_us: int = typer.Option(
        1000, min=0, max=60_000_000, metavar="N", help="Microseconds that idle threads spin before they sleep."
    ),
    kv_bytes: str = typer.Option("0", metavar="SIZE", help="Size of the KV pool, as 2GiB; 0: from the limits."),
    weight_memory: WeightMemory = typer.Option(WeightMemory.copied, help=WEIGHT_HELP),
    device: DeviceFlags = DeviceFlags(),
    prefix_cache: bool = typer.Option(True, help="Reuse KV blocks of equal prompt prefixes."),
    speculate: str | None = typer.Option(None, metavar=SPECULATE_METAVAR, help=SPECULATE_HELP),
    draft: Path | None = typer.Option(None, metavar="ARTIFACT", help=DRAFT_HELP),
    miss_policy: str = typer.Option(
        "larger", metavar=POLICY_HELP, help="What runs a step that no bucket holds; see docs/buckets.md."
    ),
    record_misses: Path | None = typer.Option(
        None, metavar="FILE", help="Append the shapes of such steps, for llmc buckets misses."
    ),
    replan: ReplanFlags = ReplanFlags(),
    memory_utilization: float | None = typer.Option(None, *UTILIZATION_NAMES, metavar="SHARE", help=UTILIZATION_HELP),
    graph_reserved_memory: float | None = typer.Option(None, envvar=RESERVED_ENV, metavar="SHARE", help=RESERVED_HELP),
    graph_prompt_ratio: float | None = typer.Option(None, envvar=RATIO_ENV, metavar="SHARE", help=RATIO_HELP),
    ready_after: str = typer.Option(
        "all",
        metavar="all|hot",
        help="Graphs that must be warm before requests are taken; the rest follows behind them.",
    ),
    warm_order: str = typer.Option(
        "auto",
        "--warm-order",
        "--warmup-order",
        metavar=ORDER_METAVAR,
        help=f"Order of the warm-up; auto: by --warm-trace, else by size.{ORDER_HELP}",
    ),
    warm_trace: Path | None = typer.Option(
        None, metavar="FILE", help="Trace of requests that says which graphs are hot, as --record-trace writes."
    ),
    warmup_seconds: float = typer.Option(REPLAY_S, min=0, metavar="S", help=SECONDS_HELP),
    skip_warmup: bool = typer.Option(
        False, "--skip-warmup", envvar=SKIP_ENV, help="Take requests at once; the first ones pay for cold graphs."
    ),
    measure_costs: bool | None = typer.Option(
        None,
        "--measure-costs/--no-measure-costs",
        help="Measure before ready what graphs cost, where `llmc warmup` has not; takes minutes for many graphs. "
        "Neither: only where it takes under 2 s of an idle machine.",
    ),
    guided_threads: int = typer.Option(
        0, min=0, max=256, metavar="N", help="Threads that compute masks of guided requests; 0: by the machine's CPUs."
    ),
    guided_additional_properties: str = typer.Option(
        "allow",
        metavar="allow|forbid",
        help="Properties that a JSON schema neither lists nor speaks of.",
    ),
    guided_max_string: int = typer.Option(
        0, min=0, max=65536, metavar="N", help="Characters of a string without maxLength in a JSON schema; 0: no bound."
    ),
    max_queue: int = typer.Option(4096, min=1, metavar="N", help="Requests that may wait; more get a 429."),
    priority_patience: int = typer.Option(
        512,
        min=1,
        max=2**32 - 1,
        metavar="STEPS",
        help="After so many steps with requests behind a higher priority, the oldest of them counts as the highest.",
    ),
    max_queue_memory: str = typer.Option(
        "0",
        metavar="SIZE",
        help="What all requests that wait or run may come to hold at worst; more get a 429. 0: a quarter of the free "
        "memory, 256MiB to 16GiB.",
    ),
    request_memory: str = typer.Option(
        "0", metavar="SIZE", help="The same for one request; more is refused. 0: a quarter of --max-queue-memory."
    ),
    max_stored_responses: int = typer.Option(
        1024, min=0, metavar="N", help="Answers of /v1/responses kept in memory for later requests; 0: none."
    ),
    max_stored_response_size: str = typer.Option("64MiB", metavar="SIZE", help="What they may take together."),
    request_timeout: float = typer.Option(0.0, min=0, metavar="S", help="Seconds a request may take; 0: no limit."),
    drain_timeout: float = typer.Option(30.0, min=0, metavar="S", help="Seconds that a shutdown lets requests finish."),
    nice: int = typer.Option(10, min=0, max=19, metavar="N", help="How far HTTP threads give way to the engine's."),
    log_level: str = typer.Option(
        "warning", "--uvicorn-log-level", "--log-level", metavar="LEVEL", help=f"One of {', '.join(_LOG_LEVELS)}."
    ),
    lora: list[str] = typer.Option([], metavar=LORA_METAVAR, help=LORA_HELP),
    allow_runtime_lora: bool = typer.Option(
        False,
        "--allow-runtime-lora",
        help="Clients may load adapters from directories of this machine, and unload them.",
    ),
    metrics: bool = typer.Option(True, help="Prometheus metrics at /metrics."),
    page: bool = typer.Option(True, help="The live page at /."),
    debug_endpoints: bool = typer.Option(
        False, "--debug-endpoints", help="/debug/engine: the engine's counters, and a check of its blocks."
    ),
    profiler_dir: Path | None = typer.Option(
        None, metavar="DIR", help="Where POST /start_profile and /stop_profile write traces of steps; default: off."
    ),
    stats_interval: float = typer.Option(
        10.0, min=0, metavar="S", callback=finite, help="Seconds between lines of throughput on stderr; 0: none."
    ),
    access_log: bool = typer.Option(True, help="A line of JSON a request."),
    access_log_file: Path | None = typer.Option(None, metavar="FILE", help="Where it goes; default: stdout."),
    log_prompts: bool = typer.Option(False, "--log-prompts", help="With the text of prompts."),
    otlp_endpoint: str | None = typer.Option(
        None, envvar="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL", help="OTLP/HTTP collector for a span a request."
    ),
    record_trace: Path | None = typer.Option(
        None, metavar="FILE", help="Record lengths and times of requests, for llmc buckets plan and llmc bench serve."
    ),
    record_trace_max_bytes: str = typer.Option(
        "1GiB", metavar="SIZE", help="Then FILE becomes FILE.1 and begins anew."
    ),
) -> None:
    if generation_config not in ("auto", "none"):
        raise typer.BadParameter(f"--generation-config {generation_config!r} is unknown: use auto or none")
    if otlp_endpoint is not None and not otlp_endpoint.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--otlp-endpoint {otlp_endpoint!r} is no URL: use OTLP over HTTP, http://HOST:4318")
    if guided_additional_properties not in ("allow", "forbid"):
        raise typer.BadParameter(
            f"--guided-additional-properties {guided_additional_properties!r} is unknown: use allow or forbid"
        )
    policy = parse_miss_policy(miss_policy, model, ready_after)
    replanning = replan.options(policy)
    speculation = check_speculation(speculate, draft)
    if record_misses is not None:
        prepare_record(record_misses)
    if log_level not in _LOG_LEVELS:
        raise typer.BadParameter(f"--uvicorn-log-level {log_level!r} is unknown: use one of {', '.join(_LOG_LEVELS)}")
    check_parsers(tool_call_parser, reasoning_parser)
    max_body_bytes, pool_bytes = parse_size(max_body_size), parse_size(kv_bytes)
    trace_bytes, stored_bytes = parse_size(record_trace_max_bytes), parse_size(max_stored_response_size)
    from llmc.runtime.server.api_keys import KeysError, read_keys

    try:
        keys = (*api_key, *(read_keys(api_key_file) if api_key_file is not None else ()))
    except KeysError as error:
        raise typer.BadParameter(str(error)) from error
    if any(not key.strip() for key in keys):
        raise typer.BadParameter("--api-key is empty: give a key, or leave it out to serve without")

    from llmc.cli.options.warm_up import WarmOptions, WarmUpPlanner, budget_options, say, warm_up_progress
    from llmc.model_name import model_name

    names = tuple(served_model_name) or (model_name(model),)
    adapters = parse_adapters(lora, names)
    budget = budget_options(memory_utilization, graph_reserved_memory, graph_prompt_ratio, pool_bytes)
    warm = WarmOptions(
        trace=warm_trace,
        strategy=warm_order,
        ready_after=ready_after,
        measure=measure_costs,
        replay_s=warmup_seconds,
        skip=skip_warmup,
        budget=budget,
    )
    artifact = model if (model / "graphs.bin").is_file() else compile_aside(model)

    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.hosts import is_loopback
    from llmc.runtime.server.run import serve

    planner = WarmUpPlanner(artifact, warm, device.options(), speculation.draft)

    config = ServerConfig(
        artifact=artifact,
        served_model_names=names,
        host=host,
        port=port,
        api_keys=keys,
        allowed_hosts=tuple(allowed_hosts),
        allowed_origins=tuple(allowed_origins),
        allowed_methods=tuple(allowed_methods),
        allowed_headers=tuple(allowed_headers),
        allow_credentials=allow_credentials,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        generation_config=generation_config,
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
        pin_threads=pin,
        idle_spin_us=idle_spin_us,
        weight_memory=weight_memory.value,
        device_options={**(planner.budget.device_options if planner.budget is not None else {}), **device.options()},
        prefix_cache=prefix_cache,
        speculation=speculation,
        miss_policy=policy,
        record_misses=record_misses,
        replan=replanning,
        guided_threads=guided_threads,
        guided_additional_properties=guided_additional_properties == "allow",
        guided_max_string=guided_max_string,
        max_queue=max_queue,
        priority_patience=priority_patience,
        max_queue_memory=parse_size(max_queue_memory),
        request_memory=parse_size(request_memory),
        max_stored_responses=max_stored_responses,
        max_stored_response_bytes=stored_bytes,
        client_timeout_s=client_timeout or None,
        request_timeout_s=request_timeout or None,
        drain_timeout_s=drain_timeout,
        nice=nice,
        uvicorn_log_level=log_level,
        enable_metrics=metrics,
        enable_page=page,
        debug_endpoints=debug_endpoints,
        profiler_dir=profiler_dir,
        stats_interval_s=stats_interval,
        access_log=access_log,
        access_log_file=access_log_file,
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint or None,
        record_trace=record_trace,
        max_body_bytes=max_body_bytes,
        kv_bytes=pool_bytes if planner.budget is None else planner.budget.kv_bytes,
        swap_bytes=device.swap_bytes,
        record_trace_max_bytes=trace_bytes,
        lora=tuple(adapters.items()),
        allow_runtime_lora=allow_runtime_lora,
    )
    if not keys and not is_loopback(host):
        say(f"warning: {host} is reachable from other machines and no --api-key is set: anybody may use this server")
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


def check_parsers(tool: str, reasoning: str) -> None:
    """Raises BadParameter for a name that is no parser's."""
    from llmc.runtime.server.tools.registry import choose_parsers

    try:
        choose_parsers(tool, reasoning, None, None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def compile_aside(model: Path) -> Path:
    """The artifact of a model, downloaded and compiled in a process of its own: this one never loads the compiler.

    Raises ModelPathError for what is no model, and typer.Exit when the compilation failed, which has told why.
    """
    from llmc.model_artifact import check_model

    check_model(model)
    code = "import sys; from llmc.cli.serve import _compile; sys.exit(_compile(sys.argv[1]))"
    child = subprocess.run(
        [sys.executable, "-P", "-c", code, str(model)], stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode != 0:
        raise typer.Exit(child.returncode if child.returncode > 0 else 1)
    return Path(child.stdout.rstrip("\n"))


def _compile(model: str) -> int:
    """What the child does: compiles and prints the artifact's path."""
    from llmc import artifact_path
    from llmc.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, describe
    from llmc.cli.render.compile_progress import progress_bar

    escape_streams()
    try:
        with progress_bar() as progress:
            print(artifact_path(model, progress), file=exact(sys.stdout))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # Ctrl-C reaches the parent as well, who says so
    except Exception as error:  # the end of a process: as in main, whatever it is becomes one sentence
        print(f"llmc: error: {describe(error)}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK
