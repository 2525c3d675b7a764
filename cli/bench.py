"""`llmc bench`: how fast a server, or the engine alone, answers."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import enum
from pathlib import Path

import typer

from llmc.cli.options.num_states import STATES_HELP
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory
from llmc.units import parse_size

_HELP = """Measure a running server under load, or the engine alone.

\b
Examples:
  llmc bench serve --url http://127.0.0.1:8000 --num-prompts 200 --rate 4
  llmc bench latency qwen.llmc --input-len 128 --output-len 64
  llmc bench throughput qwen.llmc --num-prompts 64 --concurrency 16
"""
_SERVE_HELP = """Send requests to an OpenAI-compatible server and print time to first token (TTFT), time per output
token (TPOT), inter-token latency (ITL), end-to-end latency (E2E), throughput, goodput and failures by cause.

--dataset is "random" (token ids of exact lengths), a prompts file or a trace. A prompts file is JSONL with prompt,
prompt_token_ids or messages. A trace is llmc's JSONL, an Azure LLM inference CSV or a Mooncake JSONL. --time-scale
multiplies the trace's arrival times.

\b
Examples:
  llmc bench serve --url http://127.0.0.1:8000 --input-len 256 --output-len 128 --concurrency 16 --ignore-eos
  llmc bench serve --url http://127.0.0.1:8000 --rate 4 --burstiness 0.5 --goodput ttft:500,tpot:50
  llmc bench serve --url http://127.0.0.1:8000 --dataset trace.csv --num-prompts 500 --time-scale 0.5
  llmc bench serve --url http://127.0.0.1:8000 --dataset chats.jsonl --endpoint chat --output result.json
  llmc bench serve --url http://127.0.0.1:8000 --rate 4 --html report.html
"""
_LATENCY_HELP = """Run one batch of equal requests on the engine repeatedly, without a server.

\b
Examples:
  llmc bench latency qwen.llmc --input-len 128 --output-len 64
  llmc bench latency qwen.llmc --batch 8 --repeats 10 --threads 2 --json
  llmc bench latency qwen.llmc --batch 8 --html latency.html
"""
_THROUGHPUT_HELP = """Run many requests of random tokens through the engine, without a server.

\b
Examples:
  llmc bench throughput qwen.llmc --num-prompts 64 --input-len 256 --output-len 128
  llmc bench throughput qwen.llmc --concurrency 16 --range-ratio 0.5 --repeats 3 --json
  llmc bench throughput qwen.llmc --num-prompts 64 --html throughput.html
"""


class EndpointName(enum.StrEnum):
    """API that requests are sent to."""

    completions = "completions"
    chat = "chat"


def register(app: typer.Typer) -> None:
    """Adds the group of commands to `app`."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None)
    group.command("serve", help=_SERVE_HELP)(serve_command)
    group.command("latency", help=_LATENCY_HELP)(latency_command)
    group.command("throughput", help=_THROUGHPUT_HELP)(throughput_command)
    app.add_typer(group, name="bench")


def serve_command(
    url: str = typer.Option("http://127.0.0.1:8000", metavar="URL", help="Address of the server."),
    endpoint: EndpointName = typer.Option(EndpointName.completions, help="Endpoint: completions, or chat completions."),
    model: str | None = typer.Option(None, metavar="NAME", help="Model to request; default: the server's first."),
    api_key: str | None = typer.Option(
        None, metavar="KEY", envvar="LLMC_API_KEY", help="Key for the server, sent as a bearer token.", show_envvar=True
    ),
    dataset: str = typer.Option(
        "random",
        metavar="random|FILE",
        help="random: random tokens; FILE: prompts or a trace, plain or .gz; -: a trace from stdin.",
    ),
    num_prompts: int | None = typer.Option(
        None, min=1, metavar="N", help="Requests to send; default: 200, or as many as FILE has."
    ),
    input_len: int = typer.Option(256, min=1, metavar="N", help="Prompt tokens of random requests."),
    output_len: int = typer.Option(128, min=1, metavar="N", help="Tokens to generate; a trace sets its own."),
    range_ratio: float = typer.Option(0.0, metavar="X", help="Draw random lengths from len*(1-X) to len*(1+X)."),
    prefix_len: int = typer.Option(0, min=0, metavar="N", help="Leading tokens that all random prompts share."),
    rate: float = typer.Option(float("inf"), metavar="X", help="Mean requests per second; inf: all at once."),
    burstiness: float = typer.Option(
        1.0, metavar="X", help="Regularity of arrivals; 1: Poisson; below: burstier; above: steadier."
    ),
    concurrency: int = typer.Option(0, min=0, metavar="N", help="Limit of concurrent requests; 0: none."),
    time_scale: float = typer.Option(
        1.0, metavar="X", help="Factor for a trace's arrival times; 0.1: ten times faster."
    ),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Generate every output to its full length."),
    strict: bool = typer.Option(
        False,
        "--strict-in-out-len",
        help="Count requests with other lengths in their usage as failed; implies --ignore-eos.",
    ),
    goodput: list[str] = typer.Option(
        [], metavar="METRIC:MS", help="Limits of a good request, such as ttft:500,tpot:50; repeatable."
    ),
    max_model_len: int | None = typer.Option(
        None, min=2, metavar="N", help="Clip lengths to N; default: the server's limit."
    ),
    vocab_size: int | None = typer.Option(
        None, min=2, metavar="N", help="Upper bound of random token ids; default: the server's, else 256."
    ),
    extra_body: str | None = typer.Option(None, metavar="JSON", help="Further fields of every request's body."),
    warmup: int = typer.Option(1, min=0, metavar="N", help="Requests sent first, one by one, and not counted."),
    timeout: float = typer.Option(3600.0, metavar="S", help="Seconds to wait for a complete answer."),
    seed: int = typer.Option(0, min=0, help="Seed; the same seed gives the same requests and arrivals."),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="Write the result and each request's times to FILE."
    ),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a report with distributions to FILE."),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Show no progress bar."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> int:
    from llmc.cli.bench_serve import ServeOptions, bench_serve

    options = ServeOptions(
        url=url, endpoint=endpoint.value, model=model, api_key=api_key, dataset=dataset, num_prompts=num_prompts,
        input_len=input_len, output_len=output_len, range_ratio=range_ratio, prefix_len=prefix_len, rate=rate,
        burstiness=burstiness, concurrency=concurrency, time_scale=time_scale, ignore_eos=ignore_eos or strict,
        strict=strict, goodput=tuple(goodput), max_model_len=max_model_len, vocab_size=vocab_size,
        extra_body=extra_body, warmup=warmup, timeout_s=timeout, seed=seed,
    )  # fmt: skip
    return bench_serve(options, output, quiet=quiet, as_json=as_json, html=html)


def latency_command(
    artifact: Path = typer.Argument(..., metavar="ARTIFACT", help="Directory made by llmc compile."),
    input_len: int = typer.Option(128, min=1, metavar="N", help="Tokens of each prompt."),
    output_len: int = typer.Option(64, min=1, metavar="N", help="Tokens to generate for each."),
    batch: int = typer.Option(1, min=1, metavar="N", help="Requests at once."),
    warmup: int = typer.Option(2, min=0, metavar="N", help="Runs that are not counted."),
    repeats: int = typer.Option(5, min=1, metavar="N", help="Runs that are counted."),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
    kv_bytes: int = typer.Option(
        0, parser=parse_size, metavar="SIZE", help="Size of the KV pool, such as 2GiB; 0: from the limits."
    ),
    num_states: int = typer.Option(0, min=0, metavar="N", help=STATES_HELP),
    weight_memory: WeightMemory = typer.Option(WeightMemory.copied, help=WEIGHT_HELP),
    seed: int = typer.Option(0, min=0, help="Seed; the same seed gives the same prompts."),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Write the result to FILE."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a report with distributions to FILE."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    from llmc.cli.bench_offline import OfflineOptions, bench_offline

    options = OfflineOptions(
        artifact=artifact, kind="latency", num_prompts=batch, input_len=input_len, output_len=output_len,
        range_ratio=0.0, concurrency=batch, warmup=warmup, repeats=repeats, threads=threads, kv_bytes=kv_bytes,
        num_states=num_states, weight_memory=weight_memory.value, seed=seed,
    )  # fmt: skip
    bench_offline(options, output, as_json=as_json, html=html)


def throughput_command(
    artifact: Path = typer.Argument(..., metavar="ARTIFACT", help="Directory made by llmc compile."),
    num_prompts: int = typer.Option(64, min=1, metavar="N", help="Requests of each run."),
    input_len: int = typer.Option(256, min=1, metavar="N", help="Tokens of each prompt."),
    output_len: int = typer.Option(128, min=1, metavar="N", help="Tokens to generate for each."),
    range_ratio: float = typer.Option(0.0, metavar="X", help="Draw lengths from len*(1-X) to len*(1+X)."),
    concurrency: int = typer.Option(
        0, min=0, metavar="N", help="Limit of submitted requests; 0: all, and the engine runs as many as fit."
    ),
    warmup: int = typer.Option(1, min=0, metavar="N", help="Runs that are not counted."),
    repeats: int = typer.Option(1, min=1, metavar="N", help="Runs that are counted."),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
    kv_bytes: int = typer.Option(
        0, parser=parse_size, metavar="SIZE", help="Size of the KV pool, such as 2GiB; 0: from the limits."
    ),
    num_states: int = typer.Option(0, min=0, metavar="N", help=STATES_HELP),
    weight_memory: WeightMemory = typer.Option(WeightMemory.copied, help=WEIGHT_HELP),
    seed: int = typer.Option(0, min=0, help="Seed; the same seed gives the same prompts."),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Write the result to FILE."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a report with distributions to FILE."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    from llmc.cli.bench_offline import OfflineOptions, bench_offline

    options = OfflineOptions(
        artifact=artifact, kind="throughput", num_prompts=num_prompts, input_len=input_len, output_len=output_len,
        range_ratio=range_ratio, concurrency=concurrency, warmup=warmup, repeats=repeats, threads=threads,
        kv_bytes=kv_bytes, num_states=num_states, weight_memory=weight_memory.value, seed=seed,
    )  # fmt: skip
    bench_offline(options, output, as_json=as_json, html=html)
