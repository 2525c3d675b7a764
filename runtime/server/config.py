"""Every knob of the server, one field a flag of `llmc serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.runtime.misses.options import MissPolicy
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.speculation import Speculation


@dataclass(frozen=True)
class ServerConfig:
    """Checked by the command line; sizes in bytes, times in seconds, 0 for "the engine's own default" where it says so.

    artifact: the directory that is served. served_model_names: what /v1/models lists and requests may ask for; the
    first is the one that answers name. allowed_hosts: names that clients may use for this server; none: those of this
    machine for a server without keys that listens to it alone, else any. generation_config: "auto" takes sampling
    defaults from the model, "none" those of OpenAI. max_num_seqs, max_num_batched_tokens (prompt tokens of one step),
    num_threads, kv_bytes: 0 for the engine's default.
    swap_bytes: of host memory for KV blocks that must go. idle_spin_us: microseconds that threads without work spin.
    device_options: as LLM takes them. record_misses: the file that bucket misses are appended to; None: none.
    replan: what the server does about its own buckets.
    guided_threads: threads that compute masks, 0 for as many as suit the machine. guided_additional_properties,
    guided_max_string: as in SchemaDefaults. max_queue: requests that may wait.
    priority_patience: as LLM takes it. max_queue_memory: bytes that all
    requests may come to hold, request_memory: that one may; 0: from the memory of the machine, as MemoryLimits has it.
    max_stored_responses: answers of /v1/responses that are kept, in max_stored_response_bytes at most; 0: none.
    request_timeout_s, drain_timeout_s: None for no limit, as for client_timeout_s: how long the head of a request may
    take to arrive, its body after that, and an answer to be read on.
    access_log_file: None for standard output. log_prompts: with the text of prompts.
    otlp_endpoint: base URL of the collector of spans; None: none. record_trace: where lengths and
    times of requests go; at record_trace_max_bytes the file is renamed to NAME.1 and begun anew.
    lora: name and directory of LoRA adapters that are loaded at the start; allow_runtime_lora: clients may load more,
    from any directory, and unload them.
    nice: added to the niceness of the HTTP threads, so that the engine's threads come first.
    """

    artifact: Path
    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    max_body_bytes: int = 4 << 20
    client_timeout_s: float | None = 60.0
    generation_config: str = "auto"
    chat_template: Path | None = None
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_threads: int = 0
    pin_threads: bool = True
    idle_spin_us: int = 1000
    kv_bytes: int = 0
    swap_bytes: int = 0
    weight_memory: str = "copied"
    device_options: Mapping[str, Any] = field(default_factory=dict)
    prefix_cache: bool = True
    speculation: Speculation = field(default_factory=Speculation)
    miss_policy: MissPolicy = "larger"
    record_misses: Path | None = None
    replan: ReplanOptions = field(default_factory=ReplanOptions)
    guided_threads: int = 0
    guided_additional_properties: bool = True
    guided_max_string: int = 0
    max_queue: int = 4096
    priority_patience: int = 0
    max_queue_memory: int = 0
    request_memory: int = 0
    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 64 << 20
    request_timeout_s: float | None = None
    drain_timeout_s: float | None = 30.0
    nice: int = 0
    uvicorn_log_level: str = "warning"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_metrics: bool = True
    enable_page: bool = True
    debug_endpoints: bool = False
    profiler_dir: Path | None = None
    stats_interval_s: float = 0.0
    access_log: bool = True
    access_log_file: Path | None = None
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    record_trace: Path | None = None
    record_trace_max_bytes: int = 1 << 30
    lora: tuple[tuple[str, Path], ...] = ()
    allow_runtime_lora: bool = False
