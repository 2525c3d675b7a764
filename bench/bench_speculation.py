"""What guesses of next tokens are worth: tokens/s of decoding with and without, on texts that repeat their prompts.

    python -m bench.bench_speculation make OUT [--reach 1023]
    llmc compile OUT/model -o OUT/model.llmc --speculate 16 --max-num-seqs 8 --max-model-len 2048
    llmc compile OUT/draft -o OUT/draft.llmc --max-num-seqs 8 --max-model-len 2048
    python -m bench.bench_speculation run OUT/model.llmc --texts DIR --tokenizer DIR [--draft OUT/draft.llmc]

`make` writes models of Qwen2.5-0.5B's shape that say what the beginning of their prompt hides (bench/script_model.py):
so a random model answers as a trained one might. DIR of --texts has folders humaneval, wikitext-2-raw and gsm8k
(bench/repeating_texts.py). Engines with and without guesses run the same prompts one after the other; steps with
prefill are left out. The clock is the thread's CPU time with one thread, which leaves out what other programs take.
Outputs are compared: they must be the script, token by token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.repeating_texts import KINDS, Pair, pairs
from bench.script_model import script_prompt, write
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.drafts import opened_draft
from llmc.runtime.speculation import parse_speculation


@dataclass(frozen=True)
class Measured:
    """Of one kind of text and number of sequences. tokens/s of decode steps; guesses that were checked and right."""

    kind: str
    sequences: int
    plain: float
    guessing: float
    steps: int
    tokens: int
    drafted: int
    accepted: int

    def line(self) -> str:
        right = f"{self.accepted} of {self.drafted} guesses right" if self.drafted else "no guess"
        return (
            f"{self.kind:<8} {self.sequences} sequences: {self.plain:7.1f} → {self.guessing:7.1f} tokens/s, "
            f"{self.guessing / self.plain:.2f} ×; {self.tokens / max(self.steps, 1):.2f} tokens a step, {right}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write the models")
    make.add_argument("output", type=Path)
    run = commands.add_parser("run", help="measure")
    run.add_argument("artifact", type=Path)
    run.add_argument("--texts", type=Path, required=True)
    run.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    run.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:3]))
    run.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    run.add_argument("--speculate", help="as of llmc run; default: ngram, or draft with --draft")
    run.add_argument("--draft", type=Path, help="artifact of OUT/draft")
    run.add_argument("--wrong", type=float, default=0.3, help="share of tokens that the draft knows wrongly")
    run.add_argument("--threads", type=int, default=1)
    run.add_argument("--turns", type=int, default=1)
    run.add_argument("--json", action="store_true")
    for command in (make, run):
        command.add_argument("--reach", type=int, default=1023, help="tokens of a prompt, less one")
    given = parser.parse_args()
    if given.command == "make":
        write("qwen2.5-0.5b", given.output / "model", given.reach)
        write("quarter", given.output / "draft", given.reach, draft=True)
        return 0
    found = [one for kind in given.kinds for n in given.sequences for one in [measure(given, kind, n)]]
    print(json.dumps([asdict(one) for one in found], indent=1) if given.json else "\n".join(map(Measured.line, found)))
    return 0


def measure(given: argparse.Namespace, kind: str, sequences: int) -> Measured:
    """The best of some turns of both engines. Raises RuntimeError when an output is not the script."""
    texts = pairs(kind, given.texts, given.tokenizer, sequences, given.reach - 64)
    guessing = parse_speculation(given.speculate or ("ngram" if given.draft is None else None), given.draft)
    best = {"off": 0.0, "on": 0.0}
    with Artifact(given.artifact) as artifact, opened_draft(guessing.draft, given.artifact) as draft:
        for which in best:
            options = {} if which == "off" else {**guessing.engine_options(), "draft": draft}
            with Engine(
                artifact, num_threads=given.threads, max_num_seqs=sequences, weight_memory="copied", **options
            ) as engine:
                for _ in range(given.turns):
                    tokens, seconds = decode(engine, artifact.info.vocab_size // 3, texts, given)
                    best[which] = max(best[which], tokens / seconds)
                stats = engine.stats
    return Measured(
        kind, sequences, best["off"], best["on"], stats.num_decode_steps // given.turns, tokens,
        stats.drafted_tokens // given.turns, stats.accepted_tokens // given.turns,
    )  # fmt: skip


def decode(engine: Engine, names: int, texts: Sequence[Pair], given: argparse.Namespace) -> tuple[int, float]:
    """Tokens and seconds of steps without prefill."""
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    scripts = {}
    for number, (text, script) in enumerate(texts):
        prompt = script_prompt(script, text, given.reach, names, given.wrong, number)
        params = SamplingParams(temperature=0.0, max_tokens=len(script), ignore_eos=True)
        scripts[engine.submit(prompt, params)] = script
    said: dict[int, list[int]] = {request: [] for request in scripts}
    tokens, seconds, ended = 0, 0.0, 0
    while ended < len(scripts):
        prefills, start = engine.stats.num_prefill_steps, clock()
        engine.step()
        took = clock() - start
        events = engine.poll()
        for event in events:
            ended += event.kind == "finished"
            if event.kind == "token":
                said[event.request_id].append(event.token_id)
        if engine.stats.num_prefill_steps == prefills:
            seconds += took
            tokens += sum(event.kind == "token" for event in events)
    for request, script in scripts.items():
        if said[request] != script:
            raise RuntimeError("the model did not say its script: was it made with this --reach?")
    return tokens, seconds


if __name__ == "__main__":
    raise SystemExit(main())
