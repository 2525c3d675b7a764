"""The server's configuration: one field per flag of `llmc serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmc.runtime.images.image_limits import DEFAULT_IMAGES
from llmc.runtime.misses.options import MissPolicy
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.speculation import Speculation

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class ServerConfig:
    """Validated by the command line. Sizes in bytes, times in seconds; 0 means the engine's own default where stated.

    artifact: directory to serve.
    served_model_names: listed by /v1/models and accepted in requests; answers carry the first.
    allowed_hosts: host names that clients may use. If empty: this machine's for a loopback server without keys, else
    any.
    generation_config: "auto" takes sampling defaults from the model, "none" uses OpenAI's.
    max_num_seqs, max_num_batched_tokens (prompt tokens of a step), num_threads, kv_bytes, num_states: 0 for the
    engine's default.
    swap_bytes: host memory for KV blocks that are swapped out.
    idle_spin_us: microseconds that idle threads spin.
    device_options: as in LLM.
    record_misses: file to which bucket misses are appended; None for none.
    replan: what the server does about its own buckets.
    guided_threads: threads that compute masks; 0 for automatic.
    guided_additional_properties, guided_max_string: as in SchemaDefaults.
    max_queue: most waiting requests.
    priority_patience: as in LLM.
    max_queue_memory, request_memory: memory limits of all requests and of one; 0 derives them, as in MemoryLimits.
    max_stored_responses, max_stored_response_bytes: limits on kept answers of /v1/responses; 0 keeps none.
    request_timeout_s, drain_timeout_s: None for no limit.
    client_timeout_s: time for a request's head to arrive, then its body, and for a client to resume reading; None for
    no limit.
    access_log_file: None for standard output. log_prompts: include prompt texts.
    otlp_endpoint: base URL of the span collector; None for none.
    record_trace: file for lengths and times of requests; at record_trace_max_bytes it is renamed to NAME.1.
    lora: name and directory of adapters to load at start. allow_runtime_lora: clients may load adapters from any
    directory, and unload them.
    images: artifact that encodes images for `artifact`; None: the server sees none. max_images: of one request.
    role: prefill servers give KV blocks, decode servers take them, others do both. hand_over_key: key of routers and
    servers that hand over; None: nothing is handed over. hand_over_timeout_s: longest wait for blocks. max_hand_overs:
    hand-overs at a time, for each direction.
    nice: added to the niceness of HTTP threads, so that the engine's threads take precedence.
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
    num_states: int = 0
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
    images: Path | None = None
    max_images: int = DEFAULT_IMAGES
    role: Role = "both"
    hand_over_key: str | None = field(default=None, repr=False)
    hand_over_timeout_s: float = 60.0
    max_hand_overs: int = 16
