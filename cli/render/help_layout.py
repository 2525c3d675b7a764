"""Layout of the help of all commands: headings for long lists of options, uniform value names, and no nan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand

# Summary of a command in `llmc --help`; it must fit on one line of 80 columns.
SUMMARIES: Mapping[str, str] = {
    "compile": "Compile a Hugging Face model into an artifact.",
    "run": "Generate text for prompts, offline.",
    "embed": "Compute vectors or labels of texts, offline.",
    "rank": "Sort documents by how well they answer a query, offline.",
    "serve": "Serve a model over OpenAI's HTTP API.",
    "route": "Serve replicas behind one endpoint, with failover.",
    "deploy": "Serve replicas on a Ray cluster, which scales and heals them.",
    "chat": "Talk to a model in the terminal.",
    "warmup": "Warm every graph up and measure what it costs.",
    "inspect": "Show buckets, kernels, memory and weights of an artifact.",
    "profile": "Time one bucket by kernel and command.",
    "targets": "List what models can be compiled for, and what a target has.",
    "devices": "List the devices that run artifacts here.",
    "completion": "Print a script that completes words in a shell.",
    "doctor": "Show this machine's limits, and what would make it faster.",
    "debug": "Compare artifacts, and dump results of commands.",
    "debug diff": "Find where two artifacts of one model differ.",
    "debug dump": "Write the results of a step's commands as NumPy files.",
    "buckets": "Plan, try, show and import ladders of buckets.",
    "buckets plan": "Plan the ladder that serves a trace at the least cost.",
    "buckets simulate": "Try ladders on a trace before compiling any.",
    "buckets scale": "Try a trace on ranks, stages and replicas.",
    "buckets show": "Show a ladder as a grid.",
    "buckets misses": "Show which steps missed their bucket.",
    "buckets replan": "Show which buckets to add and to retire.",
    "buckets import": "Import the ladder of a vLLM environment.",
    "quantize": "Compare quantization schemes, or write a quantized model.",
    "eval": "Measure how accurate an artifact is.",
    "eval perplexity": "Measure how well an artifact predicts a text.",
    "eval kl": "Measure the divergence of an artifact from a reference.",
    "eval tasks": "Run tasks of lm-evaluation-harness.",
    "cache": "List, explain, check and trim the compile cache.",
    "cache ls": "List the entries.",
    "cache show": "Show the components of an entry's key.",
    "cache why": "Show why something is not cached.",
    "cache diff": "Show how two artifacts or entries differ.",
    "cache verify": "Read every entry and drop the damaged ones.",
    "cache gc": "Remove the least recently used entries and artifacts.",
    "cache export": "Write entries to an archive or a shared directory.",
    "cache import": "Add the entries of an archive or a shared directory.",
    "bundle": "Pack graphs and kernels without weights, for fine-tunes.",
    "bundle create": "Write a bundle of artifacts.",
    "bundle inspect": "Show and check the content of a bundle.",
    "bundle apply": "Make an artifact of a fine-tune; nothing is compiled.",
    "bench": "Measure a running server, or the engine alone.",
    "bench serve": "Send requests to a server and measure its answers.",
    "bench latency": "Time one batch on the engine.",
    "bench throughput": "Time many requests on the engine.",
}

# Headings of long commands, with their parameters; all others appear under "Options".
Headings = Mapping[str, tuple[str, ...]]
_PLAN_COSTS = (
    "cost", "cost_table", "model", "gflops", "bandwidth", "overhead_us", "prefill_rate", "decode_step_ms"
)  # fmt: skip
HEADINGS: Mapping[str, Headings] = {
    "quantize": {
        "Numbers": ("group_size", "asymmetric", "skip"),
        "Comparing": ("schemes", "text", "tokens", "window", "dtype", "layers"),
        "Writing": (
            "output", "scheme", "method", "format", "target_kl", "calibration", "samples", "sample_tokens", "damping",
            "dry_run",
        ),
    },
    "compile": {
        "Buckets and limits": (
            "buckets", "add", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "speculate", "block_size"
        ),
        "Model": ("task", "images", "pooling", "rank_prompt", "allow_unknown_config"),
        "Precision": (
            "dtype", "kv_dtype", "quantization_param_path", "quant", "group_size", "asymmetric", "skip"
        ),
        "Adapters": ("merge_lora", "lora_slots", "lora_rank", "lora_experts"),
        "Speculation": ("eagle", "mtp", "draft_vocab", "draft_vocab_text"),
        "Target": ("target", "tensor_parallel", "pipeline_parallel", "expert_parallel", "tune"),
        "Artifact": ("output", "overwrite", "tokenizer"),
        "Building": ("cache_dir", "jobs", "dump"),
    },
    "cache why": {
        "Buckets and limits": (
            "buckets", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "speculate",
            "tensor_parallel", "pipeline_parallel", "expert_parallel", "block_size"
        ),
        "Model": ("task", "pooling", "rank_prompt", "allow_unknown_config"),
        "Precision": (
            "dtype", "kv_dtype", "quantization_param_path", "quant", "group_size", "asymmetric", "skip"
        ),
        "Adapters": ("merge_lora", "lora_slots", "lora_rank", "lora_experts"),
    },
    "run": {
        "Prompts and results": (
            "prompt", "prompts", "images", "image", "chat", "lora", "output", "resume", "overwrite", "stats", "quiet",
            "as_json",
        ),
        "Sampling": (
            "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "n", "seed", "stop", "stop_token_id", "logit_bias", "ignore_eos",
            "logprobs",
        ),
        "Engine": (
            "threads", "ranks", "distributed_executor", "rank_placement", "steps_in_flight", "overlap_sums",
            "max_num_seqs", "kv_bytes", "num_states", "weight_memory", "enforce_eager", "device_number",
            "cpu_offload_gib", "swap_space", "prefix_cache", "speculate", "draft", "miss_policy", "record_misses",
        ),
        "Budget and warm-up": (
            "memory_utilization", "graph_reserved_memory", "graph_prompt_ratio", "skip_warmup", "warmup_seconds",
        ),
    },
    "route": {
        "Replicas": ("replica", "spawn", "serve_flags", "replica_api_key", "admin_key"),
        "Network": ("host", "port", "allowed_hosts", "max_body_size", "client_timeout"),
        "Load": ("max_inflight", "max_waiting", "block_chars", "load_factor"),
        "Losses": ("patience", "retries", "health_interval", "health_timeout"),
        "Long prompts": ("spawn_prefill", "hand_over_key", "hand_over_chars"),
    },
    "deploy": {
        "Replicas": (
            "replicas", "max_replicas", "cpus_per_replica", "gpus_per_replica", "serve_flags", "replica_api_key",
        ),
        "Long prompts": ("prefill_replicas", "hand_over_key", "hand_over_chars"),
        "Scaling": ("target_load", "kv_high", "down_delay"),
        "Cluster and network": ("name", "address", "keep", "host", "port"),
        "Routing": ("endpoints", "max_inflight", "patience", "retries"),
    },
    "serve": {
        "Model": (
            "served_model_name", "images", "max_images", "generation_config", "chat_template", "tool_call_parser",
            "reasoning_parser",
        ),
        "Network": ("host", "port", "max_body_size", "client_timeout", "ssl_certfile", "ssl_keyfile"),
        "Access": (
            "api_key", "api_key_file", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers",
            "allow_credentials",
        ),
        "Adapters": ("lora", "allow_runtime_lora"),
        "Engine": (
            "max_num_seqs", "max_num_batched_tokens", "num_threads", "pin", "idle_spin_us", "ranks",
            "distributed_executor", "rank_placement", "steps_in_flight", "overlap_sums",
            "enforce_eager", "device_number", "cpu_offload_gib", "swap_space", "prefix_cache", "speculate", "draft",
            "miss_policy", "record_misses",
        ),
        "Re-planning": (
            "replan", "replan_cost", "replan_interval", "replan_margin", "replan_graphs", "replan_memory",
        ),
        "Guided decoding": ("guided_threads", "guided_additional_properties", "guided_max_string"),
        "Memory": (
            "kv_bytes", "num_states", "weight_memory", "memory_utilization", "graph_reserved_memory",
            "graph_prompt_ratio",
        ),
        "Warm-up": (
            "ready_after", "warm_order", "warm_trace", "warmup_seconds", "skip_warmup", "measure_costs",
        ),
        "Load": (
            "max_queue", "max_queue_memory", "request_memory", "priority_patience", "request_timeout", "drain_timeout",
            "nice", "max_stored_responses", "max_stored_response_size",
        ),
        "Observing": (
            "log_level", "metrics", "page", "debug_endpoints", "profiler_dir", "stats_interval", "access_log",
            "access_log_file", "log_prompts", "otlp_endpoint", "record_trace",
            "record_trace_max_bytes",
        ),
        "Behind a router": ("role", "hand_over_key", "hand_over_timeout", "max_hand_overs"),
    },
    "chat": {
        "Conversation": ("system", "load", "chat_template", "raw", "plain", "stats", "history"),
        "Sampling": (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "max_tokens", "seed", "stop",
        ),
        "Server": ("model", "api_key", "timeout"),
        "Engine of an artifact": ("threads", "kv_bytes", "num_states"),
    },
    "warmup": {
        "Order": ("trace", "order"),
        "Measuring": ("again", "seconds", "warmup_seconds"),
        "Engine": ("num_threads", "pin", "weight_memory"),
        "Result": ("cache_dir", "as_json"),
    },
    "inspect": {
        "One bucket": ("bucket", "html", "profile"),
        "Before compiling": (
            "dry_run", "allow_unknown_config", "tensor_parallel", "pipeline_parallel", "expert_parallel"
        ),
        "Checks": ("verify", "waste"),
        "Result": ("output_format", "output", "as_json"),
    },
    "profile": {
        "Step": ("bucket", "phase", "context", "repeat"),
        "Engine": ("threads", "overlap_sums", "weight_memory"),
        "Result": ("top", "trace", "html", "as_json"),
    },
    "buckets plan": {
        "Traffic": ("trace", "phase"),
        "Limits": ("max_graphs", "max_padding", "max_memory", "max_compile_time"),
        "Server": (
            "max_model_len", "max_num_seqs", "block_size", "max_prefill_batch", "max_prefill_tokens", "prefix_cache",
        ),
        "Costs": _PLAN_COSTS,
        "Ladder": ("output", "contexts", "speculate", "acceptance", "scenarios"),
    },
    "buckets simulate": {
        "Ladders and traffic": ("buckets", "trace", "speed", "limit"),
        "Server": (
            "max_model_len", "max_num_seqs", "block_size", "num_blocks", "max_prefill_tokens", "prefix_cache",
            "strict",
        ),
        "Costs": _PLAN_COSTS[1:],
        "Guesses": ("speculate", "acceptance", "draft_us"),
        "Report": ("html", "png", "as_json"),
    },
    "buckets scale": {
        "Arrangements and traffic": ("ranks", "trace", "speed", "limit"),
        "Costs of one rank": ("model", "cost_table", "gflops", "bandwidth", "undivided_us"),
        "Messages": ("latency_us", "message_us", "gbps"),
        "Server": ("buckets", "max_model_len", "max_num_seqs", "block_size", "num_blocks"),
        "Report": ("as_json",),
    },
    "buckets import": {
        "Source": ("from_vllm_env", "env_file"),
        "Server": ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "num_blocks"),
        "Ladder": ("output", "totals"),
    },
    "buckets replan": {
        "Traffic": ("trace", "url", "api_key"),
        "Limits": ("max_graphs", "max_added", "max_compile_time", "max_memory"),
        "Costs": ("cost", "least_saving"),
    },
    "eval tasks": {
        "Tasks": ("tasks", "data", "include_path", "limit", "num_fewshot", "chat", "run_code"),
        "Server": ("base_url", "served_model", "tokenizer"),
        "Result": ("html", "as_json"),
    },
    "bench latency": {
        "Requests": ("input_len", "output_len", "batch", "warmup", "repeats", "seed"),
        "Engine": ("threads", "kv_bytes", "num_states", "weight_memory"),
        "Result": ("output", "html", "as_json"),
    },
    "bench throughput": {
        "Requests": ("num_prompts", "input_len", "output_len", "range_ratio", "seed"),
        "Load": ("concurrency", "warmup", "repeats"),
        "Engine": ("threads", "kv_bytes", "num_states", "weight_memory"),
        "Result": ("output", "html", "as_json"),
    },
    "bench serve": {
        "Server": ("url", "model", "api_key", "endpoint", "timeout"),
        "Requests": (
            "dataset", "num_prompts", "input_len", "output_len", "range_ratio", "prefix_len", "seed", "ignore_eos",
            "strict", "extra_body", "max_model_len", "vocab_size",
        ),
        "Load": ("rate", "burstiness", "concurrency", "time_scale", "warmup"),
        "Result": ("goodput", "output", "html", "quiet", "as_json"),
    },
}  # fmt: skip

# Names for values of options that specify none.
_KINDS = {"int": "N", "float": "X", "str": "NAME", "path": "PATH"}


class Command(TyperCommand):
    """A command with headed options and named values: in capitals, or as a|b|c."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if param.metavar is None and not getattr(param, "is_flag", False):
                param.metavar = value_name(param)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name)
            # nan passes every range check, and no option means it.
            if isinstance(value, float) and math.isnan(value):
                raise typer.BadParameter("nan is not a value of this option", ctx=ctx, param=param)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings = HEADINGS.get(ctx.command_path.removeprefix("llmc "), {})
        heading_of = {name: heading for heading, names in headings.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in headings}}
        sections["Options"] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if param.param_type_name == "argument" else heading_of.get(param.name or "")
                sections[heading or "Options"].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def value_name(param: Any) -> str:
    """Name of a parameter's value in the help: the choices, the argument's own name, or one for its type."""
    choices = getattr(param.type, "choices", None)
    if choices is not None:
        return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
    if param.param_type_name == "argument":
        return str(param.name).upper() + ("…" if param.nargs != 1 else "")
    return _KINDS[param.type.name.removesuffix(" range")]


def lay_out(app: typer.Typer, prefix: str = "") -> None:
    """Applies layout and summary to every command of `app` and of its groups."""
    for command in app.registered_commands:
        command.cls = Command
        command.short_help = SUMMARIES[f"{prefix}{command.name}"]
    for group in app.registered_groups:
        if group.typer_instance is not None:
            lay_out(group.typer_instance, f"{prefix}{group.name} ")
            group.short_help = SUMMARIES[f"{prefix}{group.name}"]
