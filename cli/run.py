"""`llmc run`: offline inference over a batch of prompts."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.device import DeviceFlags
from llmc.cli.options.executor import ExecutorFlags, run_on_ray
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.lora import LORA_METAVAR, parse_adapters
from llmc.cli.options.miss_policy import POLICY_HELP, parse_miss_policy, say_bucket_news
from llmc.cli.options.num_states import STATES_HELP
from llmc.cli.options.sampling import SamplingOptions
from llmc.cli.options.speculate import DRAFT_HELP, SPECULATE_HELP, SPECULATE_METAVAR, check_speculation
from llmc.cli.options.warm_flags import (
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
from llmc.cli.render.live_text import LiveText
from llmc.cli.render.terminal_text import json_text
from llmc.runtime.misses.record import prepare_record
from llmc.runtime.offline.prompts import Prompt, PromptError, parse_lines, read_file
from llmc.runtime.offline.results import check_results
from llmc.units import parse_size

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM
    from llmc.runtime.offline.results import ResultsFile
    from llmc.runtime.outputs import RequestOutput
    from llmc.runtime.params import SamplingParams

_HELP = """Generate text for a batch of prompts with an artifact or a model (downloaded, compiled, cached).

Prompts come from --prompt, --prompts or, with neither, from stdin, one per line; blank lines are skipped. Sampling
defaults are the model's own. Texts go to stdout while they are generated, in the order of the prompts. --stats prints
the engine's work on stderr.

\b
Examples:
  llmc run qwen.llmc --prompt "Once upon a time" --max-tokens 64
  llmc run Qwen/Qwen3-0.6B --chat --prompt "Name three rivers."
  llmc run qwen.llmc --chat --prompt "Name three rivers." --temperature 0.7 --seed 1
  llmc run qwen.llmc --prompts questions.jsonl --output answers.jsonl
  llmc run qwen.llmc --prompts questions.jsonl --output answers.jsonl --resume
  llmc run qwen.llmc --prompt "Once upon a time" --stats
  llmc run smolvlm.llmc --images smolvlm-images.llmc --image cat.jpg --chat --prompt "What is this?"
  llmc run qwen.llmc --lora medical=adapters/medical --prompt "Diagnosis:"
  cat lines.txt | llmc run qwen.llmc --quiet --json
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("run", help=_HELP)(run_command)


@takes_option_groups
def run_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    prompt: list[str] = typer.Option([], metavar="TEXT", help="Prompt; repeatable."),
    prompts: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="FILE.txt (one prompt per line) or FILE.jsonl (prompt, images, prompt_token_ids, messages, tools).",
    ),
    images: Path | None = typer.Option(
        None, metavar="ARTIFACT", help="Artifact that encodes images, made by llmc compile --images."
    ),
    image: list[Path] = typer.Option(
        [], metavar="FILE", help="Image in front of every text prompt, or at its placeholder; repeatable."
    ),
    chat: bool = typer.Option(False, "--chat", help="Apply the chat template; a prompt is the user's message."),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Write results to FILE."),
    resume: bool = typer.Option(False, "--resume", help="Continue an interrupted --output file."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing --output file."),
    max_tokens: int = typer.Option(
        128, min=1, metavar="N", help="Longest output, in tokens; cut to the context that is left."
    ),
    min_tokens: int = typer.Option(0, min=0, metavar="N", help="Shortest output, in tokens."),
    drawing: SamplingOptions = SamplingOptions(),
    n: int = typer.Option(1, "-n", min=1, max=64, help="Continuations per prompt."),
    seed: int | None = typer.Option(None, min=0, help="Seed; the same request and seed give the same tokens."),
    stop: list[str] = typer.Option([], metavar="TEXT", help="End the text before this string; repeatable."),
    stop_token_id: list[int] = typer.Option([], metavar="ID", help="End at this token; repeatable."),
    logit_bias: list[str] = typer.Option([], metavar="ID=BIAS", help="Add BIAS to a token's logit; repeatable."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after the end-of-sequence token."),
    logprobs: int | None = typer.Option(
        None, min=0, max=20, metavar="N", help="Return log-probabilities, with N alternatives."
    ),
    lora: list[str] = typer.Option(
        [],
        metavar=LORA_METAVAR,
        help='LoRA adapter, as PEFT saves it; repeatable. One is for all prompts; of several, "lora": NAME of a prompt '
        "in FILE.jsonl chooses.",
    ),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
    max_num_seqs: int = typer.Option(0, min=0, metavar="N", help="Sequences per step; 0: the artifact's limit."),
    kv_bytes: int = typer.Option(
        0, parser=parse_size, metavar="SIZE", help="Size of the KV pool, such as 2GiB; 0: from the limits."
    ),
    num_states: int = typer.Option(0, min=0, metavar="N", help=STATES_HELP),
    weight_memory: WeightMemory = typer.Option(WeightMemory.auto, help=WEIGHT_HELP),
    device: DeviceFlags = DeviceFlags(),
    executor: ExecutorFlags = ExecutorFlags(),
    prefix_cache: bool = typer.Option(True, help="Reuse KV blocks of equal prompt prefixes."),
    speculate: str | None = typer.Option(None, metavar=SPECULATE_METAVAR, help=SPECULATE_HELP),
    draft: Path | None = typer.Option(None, metavar="ARTIFACT", help=DRAFT_HELP),
    miss_policy: str = typer.Option(
        "larger", metavar=POLICY_HELP, help="How to run a step that no bucket fits; see docs/buckets.md."
    ),
    record_misses: Path | None = typer.Option(
        None, metavar="FILE", help="Append the shapes of steps that fit no bucket to FILE, for llmc buckets misses."
    ),
    memory_utilization: float | None = typer.Option(None, *UTILIZATION_NAMES, metavar="SHARE", help=UTILIZATION_HELP),
    graph_reserved_memory: float | None = typer.Option(None, envvar=RESERVED_ENV, metavar="SHARE", help=RESERVED_HELP),
    graph_prompt_ratio: float | None = typer.Option(None, envvar=RATIO_ENV, metavar="SHARE", help=RATIO_HELP),
    skip_warmup: bool = typer.Option(
        True, "--skip-warmup/--warmup", envvar=SKIP_ENV, help="Warm every graph up before the first prompt, or not."
    ),
    warmup_seconds: float = typer.Option(REPLAY_S, min=0, metavar="S", help=SECONDS_HELP),
    verify: bool = typer.Option(False, "--verify", help="First compare every byte of the artifact with its checksum."),
    stats: bool = typer.Option(False, "--stats", help="Print times, rates and the graphs that ran on stderr."),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Show no progress bar."),
    as_json: bool = typer.Option(False, "--json", help="Print results and summary as one JSON object on stdout."),
) -> None:
    if resume and output is None:
        raise typer.BadParameter("--resume needs --output FILE.jsonl")
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")
    run_on_ray(executor, model, threads, reads_stdin=True)
    policy = parse_miss_policy(miss_policy, model)
    speculation = check_speculation(speculate, draft)
    if record_misses is not None:
        prepare_record(record_misses)
    if output is not None:
        check_results(output, resume=resume, overwrite=overwrite)
    sampling = {
        **asdict(drawing), "n": n, "max_tokens": max_tokens, "min_tokens": min_tokens, "seed": seed,
        "stop": tuple(stop), "stop_token_ids": tuple(stop_token_id), "ignore_eos": ignore_eos, "logprobs": logprobs,
        "logit_bias": parse_logit_bias(logit_bias),
    }  # fmt: skip
    check_sampling(sampling)
    adapters = parse_adapters(lora)
    if image and images is None:
        raise typer.BadParameter("--image needs --images ARTIFACT, which llmc compile --images makes")
    items = with_images(with_adapters(gather_prompts(prompt, prompts, chat=chat), list(adapters)), image)
    check_budget(memory_utilization, graph_reserved_memory, graph_prompt_ratio, kv_bytes)

    from llmc import artifact_path
    from llmc.runtime.llm import LLM
    from llmc.runtime.offline.identity import run_identity
    from llmc.runtime.offline.results import ResultsFile

    if (model / "graphs.bin").is_file() or quiet:
        artifact = artifact_path(model)
    else:
        from llmc.cli.render.compile_progress import progress_bar

        with progress_bar() as progress:
            artifact = artifact_path(model, progress)
    device.check(artifact)
    if verify:
        from llmc.cli.options.artifact_checks import check_bytes

        found = check_bytes(artifact)
        if not quiet:
            print(found, file=sys.stderr)
    results: ResultsFile | None = None
    try:
        with LLM(
            artifact,
            num_threads=threads,
            max_num_seqs=max_num_seqs,
            kv_bytes=kv_bytes,
            num_states=num_states,
            swap_bytes=device.swap_bytes,
            weight_memory=weight_memory.value,
            device_options=device.options(),
            prefix_cache=prefix_cache,
            speculate=speculate,
            draft=speculation.draft,
            miss_policy=policy,
            record_misses=record_misses,
            on_bucket_news=say_bucket_news,
            memory_utilization=memory_utilization,
            graph_reserved_memory=graph_reserved_memory,
            graph_prompt_ratio=graph_prompt_ratio,
            skip_warmup=skip_warmup,
            warmup_seconds=warmup_seconds,
            on_warm_step=None if quiet else lambda step: print(step.line(), file=sys.stderr),
            lora=adapters,
            images=images,
        ) as llm:
            if llm.budget is not None and not quiet:
                print(*(f"llmc: memory: {line}" for line in llm.budget.lines), sep="\n", file=sys.stderr)
            if not quiet:
                _say_launched(llm, eager=device.enforce_eager)
            params = llm.default_params(**sampling)
            if output is not None:
                identity = run_identity(artifact, items, params, chat=chat, lora=adapters, images=images)
                results = ResultsFile(output, items, identity, resume=resume, overwrite=overwrite)
            live = None
            if output is None and not as_json:
                heads = ["" if chat else item.text or "" for item in items]
                live = LiveText(heads, n, sys.stdout, ids=not llm.writes_text)
            outputs, summary = run_prompts(llm, items, params, results, chat=chat, quiet=quiet, live=live)
    except KeyboardInterrupt:
        if results is not None and not quiet:
            done = len(results.finished)
            print(f"llmc: {done} of {len(items)} results kept, --resume continues", file=sys.stderr)
        raise
    finally:
        if results is not None:
            results.close()
    if as_json:
        shown = {"summary": summary} if output is not None else {"results": outputs, "summary": summary}
        print(json_text(shown, indent=2))
    if stats:
        from llmc.cli.render.run_summary import print_summary

        print_summary(summary)
    failed = [record for record in outputs if "error" in record]
    if failed:
        first = failed[0]
        which = f"{len(failed)} of {len(items)} prompts failed, the first is {first['index']}"
        print(f"llmc: error: {which}: {first['error']['message']}", file=sys.stderr)
        raise typer.Exit(1)


def _say_launched(llm: LLM, *, eager: bool) -> None:
    """Says once that nothing is recorded, or not all."""
    from llmc.runtime.launched_graphs import launched_graphs

    warning = launched_graphs(llm.graphs, llm.engine.graph_stats(), llm.engine.stats.device, eager=eager)
    if warning is not None:
        print(f"llmc: {warning}", file=sys.stderr)


def check_budget(utilization: float | None, reserved: float | None, ratio: float | None, kv_bytes: int) -> None:
    """Turns an impossible budget into a usage error before anything is opened."""
    from llmc.runtime.warm_up.budget import BudgetError, budget_of

    try:
        budget_of(utilization, reserved, ratio, kv_bytes)
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from error


def parse_logit_bias(options: Sequence[str]) -> dict[int, float]:
    """["15=-2.5"] → {15: -2.5}. Raises BadParameter."""
    biases = {}
    for option in options:
        token, _, bias = option.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias {option!r} is not ID=BIAS, for example 15=-2.5") from None
    return biases


def check_sampling(sampling: dict[str, Any]) -> None:
    """Turns a sampling flag out of range into a usage error before anything is opened."""
    from llmc.runtime.params import SamplingParams
    from llmc.runtime.request_error import RequestError

    try:
        SamplingParams(**{key: value for key, value in sampling.items() if value is not None})
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


def gather_prompts(
    texts: Sequence[str],
    file: Path | None,
    *,
    chat: bool,
    flags: tuple[str, str] = ("--prompt", "--prompts"),
    may_be_empty: bool = False,
) -> list[Prompt]:
    """Prompts of the flags, or of stdin if there are none. flags: of a text, and of a file. may_be_empty: take empty
    texts. Raises BadParameter or PromptError."""
    of_text, of_file = flags
    what = of_text.removeprefix("--")
    for text in texts:
        if not text and not may_be_empty:
            raise typer.BadParameter(f"{of_text} is empty: give at least one character")
    items = [Prompt(text=text) for text in texts]
    if file is not None:
        items.extend(read_file(file, what, may_be_empty=may_be_empty))
    if not texts and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter(f"no {what}: use {of_text} TEXT, {of_file} FILE, or pipe lines into stdin")
        try:
            items = parse_lines(sys.stdin)
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin is not UTF-8 at byte {error.start}: convert it first") from error
        if not items:
            raise typer.BadParameter(f"no {what}: stdin is empty; give {of_text} or {of_file}")
    for index, item in enumerate(items):
        if chat and item.token_ids is not None:
            raise PromptError(f"prompt {index} is token ids, which --chat cannot render: give prompt or messages")
        if not chat and item.messages is not None:
            raise PromptError(f"prompt {index} has messages: pass --chat to render them")
    return items


def with_adapters(items: list[Prompt], names: Sequence[str]) -> list[Prompt]:
    """The prompts; those without an adapter get the only one loaded. Raises PromptError for an unknown name."""
    for index, item in enumerate(items):
        if item.lora is not None and item.lora not in names:
            known = ", ".join(names) or "none"
            raise PromptError(f"prompt {index} is for the adapter {item.lora!r}: --lora gives {known}")
    if len(names) != 1:
        return items
    return [replace(item, lora=item.lora or names[0]) for item in items]


def with_images(items: list[Prompt], images: Sequence[Path]) -> list[Prompt]:
    """The prompts; texts without images of their own get these."""
    files = tuple(map(str, images))
    return [replace(item, images=files) if item.text is not None and not item.images else item for item in items]


def run_prompts(
    llm: LLM,
    items: Sequence[Prompt],
    params: SamplingParams,
    results: ResultsFile | None,
    *,
    chat: bool = False,
    quiet: bool = True,
    live: LiveText | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs the prompts that `results` does not contain yet. Returns (records of this run in input order, summary).

    live: prints the texts meanwhile.
    """
    from llmc.cli.render.run_summary import Summary, progress_bar

    finished = frozenset() if results is None else results.finished
    todo = [index for index in range(len(items)) if index not in finished]
    records: dict[int, dict[str, Any]] = {}
    summary = Summary(num_resumed=len(finished))

    def store(output: RequestOutput) -> None:
        index = todo[output.index]
        record = as_record(index, items[index], output)
        if results is not None:
            results.add(record)
        records[index] = record
        summary.add(output)

    prompts = [_model_input(items[index], chat) for index in todo]
    # A bar on the terminal that shows the texts would break them up.
    torn = live is not None and sys.stdout.isatty()
    try:
        with progress_bar(quiet or torn) as progress:
            on_delta = None if live is None else live.take
            names = [items[index].lora for index in todo]
            llm.generate(prompts, params, on_output=store, on_delta=on_delta, progress=progress, lora=names)
    finally:
        if live is not None:
            live.close()
    return [records[index] for index in sorted(records)], summary.as_dict(llm)


def _model_input(item: Prompt, chat: bool) -> Any:
    if item.token_ids is not None:
        return list(item.token_ids)
    conversation = item.as_chat()
    if chat and conversation is not None:
        return {"messages": conversation, "tools": item.tools}
    return {"prompt": item.text, "images": list(item.images)} if item.images else item.text


def as_record(index: int, item: Prompt, output: RequestOutput) -> dict[str, Any]:
    """The output line of one prompt. With n > 1 the first continuation is at the top level and all are in `outputs`."""
    completions = []
    for completion in output.outputs:
        fields: dict[str, Any] = {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
        if completion.finish_detail is not None:
            fields["finish_detail"] = completion.finish_detail
        if completion.logprobs is not None:
            fields["logprobs"] = [
                {"token_id": p.token_id, "logprob": p.logprob, "top": {str(t): v for t, v in p.top.items()}}
                for p in completion.logprobs
            ]
        completions.append(fields)
    record = {
        "index": index,
        **item.as_record(),
        **completions[0],
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
    }
    if len(completions) > 1:
        record["outputs"] = completions
    if output.error is not None:
        record["error"] = {"code": output.error.code, "message": output.error.message}
    return record
