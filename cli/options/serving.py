"""Flags of `llmc serve` that are fields of its config."""

from __future__ import annotations

import typer

from llmc.cli.options.config_flags import ConfigFlags, Flag
from llmc.cli.options.hand_over import hand_over_key
from llmc.cli.options.http_limits import DRAIN_TIMEOUT, HTTP_LIMITS
from llmc.cli.options.num_states import STATES_HELP
from llmc.cli.options.numbers import finite
from llmc.cli.options.web_names import allowed_hosts, allowed_origins
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.hand_over_headers import KEY_ENV

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def _allowed(word: str) -> bool:
    if word not in ("allow", "forbid"):
        raise typer.BadParameter(f"--guided-additional-properties {word!r} is unknown: use allow or forbid")
    return word == "allow"


def _role(word: str) -> str:
    if word not in ("both", "prefill", "decode"):
        raise typer.BadParameter(f"--role {word!r} is unknown: use both, prefill or decode")
    return word


SERVING = ConfigFlags(
    ServerConfig,
    host=Flag("Address to listen on; 0.0.0.0: every address.", metavar="ADDRESS"),
    port=Flag("Port to listen on; 0: any free one.", min=0, max=65535),
    allowed_hosts=Flag(
        "Accepted Host name, *.NAME, or * for any; repeatable. Default: any, with keys or on an "
        "address that other machines reach; else localhost, 127.0.0.1 and [::1].",
        read=allowed_hosts,
        metavar="HOST",
    ),
    allowed_origins=Flag("Web origin for CORS, or *; repeatable.", read=allowed_origins, metavar="ORIGIN"),
    allowed_methods=Flag("Methods for CORS.", metavar="METHOD"),
    allowed_headers=Flag("Headers for CORS.", metavar="HEADER"),
    allow_credentials=Flag("Allow credentials for CORS.", "--allow-credentials"),
    ssl_certfile=Flag("TLS certificate (PEM).", metavar="FILE"),
    ssl_keyfile=Flag("Private key of the certificate (PEM).", metavar="FILE"),
    **HTTP_LIMITS,
    generation_config=Flag("Sampling defaults; auto: the model's; none: OpenAI's.", metavar="auto|none"),
    chat_template=Flag("Jinja chat template, instead of the model's.", metavar="FILE"),
    images=Flag("Artifact that encodes images, made by llmc compile --images.", metavar="ARTIFACT"),
    max_images=Flag("Images of one request.", min=1, max=1024, metavar="N"),
    tool_call_parser=Flag(
        "Format of the model's tool calls: auto, none, hermes, qwen, llama3_json, mistral, gemma4, lfm2, "
        "pythonic, llama4_pythonic.",
        default="auto",
        metavar="NAME",
    ),
    reasoning_parser=Flag(
        "Format of the model's reasoning: auto, none, qwen3, deepseek_r1, gemma4.", default="auto", metavar="NAME"
    ),
    max_num_seqs=Flag("Sequences per step; 0: the artifact's limit.", min=0, metavar="N"),
    max_num_batched_tokens=Flag(
        "Tokens of a step with prefill, and so of a chunk; 0: those of the largest graph.",
        "--max-num-batched-tokens",
        "--prefill-chunk-size",
        min=0,
        metavar="N",
    ),
    num_threads=Flag("Threads; 0: every CPU of this process.", "--num-threads", "--threads", min=0, metavar="N"),
    pin_threads=Flag("Bind each thread to its own CPU.", "--pin/--no-pin", name="pin"),
    idle_spin_us=Flag(
        "Microseconds for which idle threads spin before they sleep.", min=0, max=60_000_000, metavar="N"
    ),
    num_states=Flag(STATES_HELP, min=0, metavar="N"),
    weight_memory=Flag(WEIGHT_HELP, default=WeightMemory.copied, given=WeightMemory, read=str),
    prefix_cache=Flag("Reuse KV blocks of equal prompt prefixes."),
    record_misses=Flag(
        "Append the shapes of steps that fit no bucket to FILE, for llmc buckets misses.", metavar="FILE"
    ),
    guided_threads=Flag(
        "Threads that compute masks of guided requests; 0: by the number of CPUs.", min=0, max=256, metavar="N"
    ),
    guided_additional_properties=Flag(
        "Properties that a JSON schema does not list.",
        default="allow",
        given=str,
        read=_allowed,
        metavar="allow|forbid",
    ),
    guided_max_string=Flag(
        "Longest string without maxLength in a JSON schema, in characters; 0: no limit.", min=0, max=65536, metavar="N"
    ),
    max_queue=Flag("Waiting requests; further ones get a 429.", min=1, metavar="N"),
    priority_patience=Flag(
        "Steps after which the oldest request behind a higher priority gets the highest.",
        default=512,
        min=1,
        max=2**32 - 1,
        metavar="STEPS",
    ),
    max_queue_memory=Flag(
        "Worst-case memory of all waiting and running requests; further ones get a 429. 0: a "
        "quarter of the free memory, 256MiB to 16GiB.",
        size=True,
        metavar="SIZE",
    ),
    request_memory=Flag(
        "Worst-case memory of one request; larger ones are refused. 0: a quarter of that of all requests.",
        size=True,
        metavar="SIZE",
    ),
    max_stored_responses=Flag("Stored answers of /v1/responses; 0: none.", min=0, metavar="N"),
    max_stored_response_bytes=Flag(
        "Size of all stored answers.", name="max_stored_response_size", size=True, metavar="SIZE"
    ),
    request_timeout_s=Flag(
        "Seconds that a request may take before it gets a 408; 0: no limit.", name="request_timeout", min=0, metavar="S"
    ),
    drain_timeout_s=DRAIN_TIMEOUT,
    nice=Flag(
        "Niceness of the HTTP threads, which lets the engine's run first.", default=10, min=0, max=19, metavar="N"
    ),
    uvicorn_log_level=Flag(
        f"One of {', '.join(LOG_LEVELS)}.", "--uvicorn-log-level", "--log-level", name="log_level", metavar="LEVEL"
    ),
    allow_runtime_lora=Flag(
        "Let clients load adapters from directories of this machine, and unload them.", "--allow-runtime-lora"
    ),
    role=Flag(
        "Part of the work behind llmc route. prefill: compute long prompts for others; decode: take them from prefill "
        "servers.",
        given=str,
        read=_role,
        metavar="both|prefill|decode",
    ),
    hand_over_key=Flag(
        "Key of routers and servers that hand over KV blocks, 16 characters or more; default: none are handed over.",
        envvar=KEY_ENV,
        read=hand_over_key,
        metavar="KEY",
    ),
    hand_over_timeout_s=Flag(
        "Seconds to wait for KV blocks; then the server computes the prompt.",
        name="hand_over_timeout",
        min=0.01,
        metavar="S",
        callback=finite,
    ),
    max_hand_overs=Flag("Hand-overs of KV blocks at a time, for each direction.", min=1, max=4096, metavar="N"),
    enable_metrics=Flag("Serve Prometheus metrics at /metrics.", name="metrics"),
    enable_page=Flag("Serve the live page at /.", name="page"),
    debug_endpoints=Flag(
        "Serve /debug/engine: the engine's counters, and a check of its KV blocks.", "--debug-endpoints"
    ),
    profiler_dir=Flag(
        "Directory for traces of steps, by POST /start_profile and /stop_profile; default: off.", metavar="DIR"
    ),
    stats_interval_s=Flag(
        "Seconds between lines of throughput on stderr; 0: none.",
        name="stats_interval",
        default=10.0,
        min=0,
        metavar="S",
        callback=finite,
    ),
    access_log=Flag("Write one line of JSON per request."),
    access_log_file=Flag("File for the access log; default: stdout.", metavar="FILE"),
    log_prompts=Flag("Include the text of prompts in the access log.", "--log-prompts"),
    otlp_endpoint=Flag(
        "OTLP/HTTP collector for one span per request.", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL"
    ),
    record_trace=Flag(
        "File for lengths and times of requests, for llmc buckets plan and llmc bench serve.", metavar="FILE"
    ),
    record_trace_max_bytes=Flag(
        "Size at which FILE is renamed to FILE.1 and a new one begins.", size=True, metavar="SIZE"
    ),
)
"""A default of its own is for a process that does nothing else than serve."""
