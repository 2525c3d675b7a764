"""Flags of `llmc serve` that are fields of its config."""

from __future__ import annotations

import typer

from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.numbers import finite
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory
from llmc.runtime.server.config import ServerConfig

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def _allowed(word: str) -> bool:
    if word not in ("allow", "forbid"):
        raise typer.BadParameter(f"--guided-additional-properties {word!r} is unknown: use allow or forbid")
    return word == "allow"


SERVING = ConfigFlags(
    ServerConfig,
    host=Flag("Address to listen on; 0.0.0.0: all.", metavar="ADDRESS"),
    port=Flag("Port to listen on; 0: any that is free.", min=0, max=65535),
    allowed_hosts=Flag(
        "Name that clients may use for this server, *.NAME, or * for any; may be repeated. Default: any with keys "
        "or on another address than this machine's own, else localhost, 127.0.0.1 and [::1].",
        metavar="HOST",
    ),
    allowed_origins=Flag("Web origin for CORS, or *; may be repeated.", metavar="ORIGIN"),
    allowed_methods=Flag("Methods for CORS.", metavar="METHOD"),
    allowed_headers=Flag("Headers for CORS.", metavar="HEADER"),
    allow_credentials=Flag("Credentials for CORS.", "--allow-credentials"),
    ssl_certfile=Flag("TLS certificate (PEM).", metavar="FILE"),
    ssl_keyfile=Flag("Its private key (PEM).", metavar="FILE"),
    max_body_bytes=Flag("Largest body of a request.", name="max_body_size", size=True, metavar="SIZE"),
    client_timeout_s=Flag(
        "Seconds for a request to arrive, and for an answer to be read on; 0: no limit.",
        name="client_timeout",
        min=0,
        metavar="S",
    ),
    generation_config=Flag("Sampling defaults: the model's, or none.", metavar="auto|none"),
    chat_template=Flag("Jinja chat template, instead of the model's.", metavar="FILE"),
    tool_call_parser=Flag(
        "How the model writes tool calls: auto, none, hermes, qwen, llama3_json, mistral.",
        default="auto",
        metavar="NAME",
    ),
    reasoning_parser=Flag(
        "How the model writes its reasoning: auto, none, qwen3, deepseek_r1.", default="auto", metavar="NAME"
    ),
    max_num_seqs=Flag("Sequences that run at once; 0: the artifact's.", min=0, metavar="N"),
    max_num_batched_tokens=Flag(
        "Tokens of a step with prefill, so also of a chunk; 0: the largest graph.",
        "--max-num-batched-tokens",
        "--prefill-chunk-size",
        min=0,
        metavar="N",
    ),
    num_threads=Flag("Threads; 0: every CPU this process may use.", "--num-threads", "--threads", min=0, metavar="N"),
    pin_threads=Flag("Keep each thread on a CPU of its own.", "--pin/--no-pin", name="pin"),
    idle_spin_us=Flag("Microseconds that idle threads spin before they sleep.", min=0, max=60_000_000, metavar="N"),
    weight_memory=Flag(WEIGHT_HELP, default=WeightMemory.copied, given=WeightMemory, read=str),
    prefix_cache=Flag("Reuse KV blocks of equal prompt prefixes."),
    record_misses=Flag("Append the shapes of such steps, for llmc buckets misses.", metavar="FILE"),
    guided_threads=Flag(
        "Threads that compute masks of guided requests; 0: by the machine's CPUs.", min=0, max=256, metavar="N"
    ),
    guided_additional_properties=Flag(
        "Properties that a JSON schema neither lists nor speaks of.",
        default="allow",
        given=str,
        read=_allowed,
        metavar="allow|forbid",
    ),
    guided_max_string=Flag(
        "Characters of a string without maxLength in a JSON schema; 0: no bound.", min=0, max=65536, metavar="N"
    ),
    max_queue=Flag("Requests that may wait; more get a 429.", min=1, metavar="N"),
    priority_patience=Flag(
        "After so many steps with requests behind a higher priority, the oldest of them counts as the highest.",
        default=512,
        min=1,
        max=2**32 - 1,
        metavar="STEPS",
    ),
    max_queue_memory=Flag(
        "What all requests that wait or run may come to hold at worst; more get a 429. 0: a quarter of the free "
        "memory, 256MiB to 16GiB.",
        size=True,
        metavar="SIZE",
    ),
    request_memory=Flag(
        "The same for one request; more is refused. 0: a quarter of --max-queue-memory.", size=True, metavar="SIZE"
    ),
    max_stored_responses=Flag(
        "Answers of /v1/responses kept in memory for later requests; 0: none.", min=0, metavar="N"
    ),
    max_stored_response_bytes=Flag(
        "What they may take together.", name="max_stored_response_size", size=True, metavar="SIZE"
    ),
    request_timeout_s=Flag("Seconds a request may take; 0: no limit.", name="request_timeout", min=0, metavar="S"),
    drain_timeout_s=Flag(
        "Seconds that a shutdown lets requests finish.",
        name="drain_timeout",
        given=float,
        read=float,
        min=0,
        metavar="S",
    ),
    nice=Flag("How far HTTP threads give way to the engine's.", default=10, min=0, max=19, metavar="N"),
    uvicorn_log_level=Flag(
        f"One of {', '.join(LOG_LEVELS)}.", "--uvicorn-log-level", "--log-level", name="log_level", metavar="LEVEL"
    ),
    allow_runtime_lora=Flag(
        "Clients may load adapters from directories of this machine, and unload them.", "--allow-runtime-lora"
    ),
    enable_metrics=Flag("Prometheus metrics at /metrics.", name="metrics"),
    enable_page=Flag("The live page at /.", name="page"),
    debug_endpoints=Flag("/debug/engine: the engine's counters, and a check of its blocks.", "--debug-endpoints"),
    profiler_dir=Flag(
        "Where POST /start_profile and /stop_profile write traces of steps; default: off.", metavar="DIR"
    ),
    stats_interval_s=Flag(
        "Seconds between lines of throughput on stderr; 0: none.",
        name="stats_interval",
        default=10.0,
        min=0,
        metavar="S",
        callback=finite,
    ),
    access_log=Flag("A line of JSON a request."),
    access_log_file=Flag("Where it goes; default: stdout.", metavar="FILE"),
    log_prompts=Flag("With the text of prompts.", "--log-prompts"),
    otlp_endpoint=Flag(
        "OTLP/HTTP collector for a span a request.", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL"
    ),
    record_trace=Flag(
        "Record lengths and times of requests, for llmc buckets plan and llmc bench serve.", metavar="FILE"
    ),
    record_trace_max_bytes=Flag("Then FILE becomes FILE.1 and begins anew.", size=True, metavar="SIZE"),
)
"""A default of its own is for a process that does nothing else than serve."""
