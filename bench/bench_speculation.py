"""Gain from speculation: tokens/s of decoding with and without guesses; one command makes the whole table.

    python -m bench.bench_speculation make OUT [--reach 1023]
    llmc compile OUT/model -o OUT/model.llmc --speculate 7 --max-num-seqs 8 --max-model-len 2048
    llmc compile OUT/draft -o OUT/draft.llmc --max-num-seqs 8 --max-model-len 2048
    llmc compile OUT/draft -o OUT/draft-w4a16.llmc --quant w4a16 --max-num-seqs 8 --max-model-len 2048
    python -m bench.bench_speculation run OUT/model.llmc --texts DIR --tokenizer DIR \\
        --draft OUT/draft.llmc OUT/draft-w4a16.llmc --machine "one thread of …" --json bench/results/NAME.json

`make` writes models of Qwen2.5-0.5B's and LFM2-1.2B's shapes, and a draft with a quarter of the first one's layers'
weights. They output a script hidden in their prompt (bench/script_model.py), so that a random model answers as a
trained one might. A draft is wrong about the share --wrong of all tokens, whatever its format. DIR of --texts has
folders humaneval, wikitext-2-raw and gsm8k (bench/repeating_texts.py).

One engine decodes without guesses, one with guesses from the prompt, and one with those of each draft. They take turns,
text by text. The best turn of each counts, except the first, in which costs are learnt. Steps with prefill do not
count, and with --forced neither do those of a draft that lack guesses of a sequence. A draft's time to read a prompt
does, since it reads beside decoding. With one thread the clock is the thread's CPU time, which excludes other programs.
Outputs are compared: they must be the script, token by token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bench.repeating_texts import KINDS, Pair, pairs
from bench.script_model import script_prompt, write
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.drafts import opened_draft
from llmc.runtime.speculation import parse_speculation

LOOKUP_KINDS = ("edit", "summary", "answer")
"""Kinds of texts for guesses from the prompt, and kinds whose answers are long enough for a draft."""
KIND_NAMES = {
    "edit": "a function, with a variable renamed",
    "summary": "every second sentence of a paragraph",
    "answer": "an answer of GSM8K to its question",
    "article": "paragraphs that no prompt repeats",
}


@dataclass(frozen=True)
class Run:
    """One turn of an engine over some texts: decode steps, their tokens and seconds, guesses checked and right."""

    steps: int
    tokens: int
    seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Measured:
    """Figures of one kind of text, number of sequences and way to guess.

    plain, guessing: tokens/s of decode steps without and with guesses, in the best turn of each. Steps, tokens and
    guesses are those of the turn with guesses.
    """

    kind: str
    sequences: int
    guesses: str
    plain: float
    guessing: float
    gain: float
    steps: int
    tokens: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, kind: str, sequences: int, guesses: str, plain: Run, guessing: Run) -> Measured:
        gain = guessing.rate / plain.rate
        counts = (guessing.steps, guessing.tokens, guessing.drafted, guessing.accepted)
        return cls(kind, sequences, guesses, plain.rate, guessing.rate, gain, *counts)

    def line(self) -> str:
        right = f"{self.accepted} of {self.drafted} guesses right" if self.drafted else "no guess"
        return (
            f"{self.kind:<8} {self.sequences} sequences, {self.guesses:<16} "
            f"{self.plain:6.1f} → {self.guessing:6.1f} tokens/s, {self.gain:.2f} ×; "
            f"{self.tokens / max(self.steps, 1):.2f} tokens a step, {right}"
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
    run.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    run.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    run.add_argument("--most", type=int, default=400, help="tokens of an answer; longer ones are cut")
    run.add_argument("--draft", type=Path, nargs="*", default=[], help="artifacts of OUT/draft")
    run.add_argument("--wrong", type=float, default=0.3, help="share of tokens that a draft knows wrongly")
    run.add_argument(
        "--forced", type=int, default=0, metavar="N", help="drafts make N guesses, whether these pay or not"
    )
    run.add_argument("--threads", type=int, default=1)
    run.add_argument("--turns", type=int, default=3)
    run.add_argument("--machine", default="", help="what the file says of the machine")
    run.add_argument("--json", type=Path, help="file for the results")
    for command in (make, run):
        command.add_argument("--reach", type=int, default=1023, help="tokens of a prompt, less one")
    given = parser.parse_args()
    if given.command == "make":
        write("qwen2.5-0.5b", given.output / "model", given.reach)
        write("quarter", given.output / "draft", given.reach, draft=True)
        write("lfm2-1.2b", given.output / "states", given.reach)
        return 0
    found = [one for sequences in given.sequences for one in measure(given, sequences)]
    if given.json is not None:
        given.json.write_text(json.dumps(document(given, found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def document(given: argparse.Namespace, found: Sequence[Measured]) -> dict[str, Any]:
    """A document of bench/results (bench/peers/results.py): a table, and all figures beside it."""
    rows = [
        {
            "name": f"{KIND_NAMES[one.kind]}, {one.guesses}",
            "values": [
                one.sequences,
                round(one.gain, 2),
                f"{one.accepted / one.drafted:.0%}" if one.drafted else "none",
            ],
        }
        for one in found
    ]
    run = ["python -m bench.bench_speculation run", str(given.artifact), "--texts DIR --tokenizer DIR"]
    drafts = ["--draft", *map(str, given.draft)] if given.draft else []
    heads = ["text, guesses of", "sequences", "× tok/s of plain decoding", "guesses right"]
    return {
        "format": 1,
        "title": "speculation",
        "machine": given.machine,
        "date": date.today().isoformat(),
        "commands": [" ".join([*run, *drafts])],
        "tables": {"texts": {"heads": heads, "rows": rows}},
        "measured": [asdict(one) for one in found],
    }


def measure(given: argparse.Namespace, sequences: int) -> Iterator[Measured]:
    """Measures every kind of text with every way to guess that suits it, and prints each. Raises RuntimeError when an
    output is not the script."""
    with ExitStack() as stack:
        artifact = stack.enter_context(Artifact(given.artifact))
        engines: dict[str, Engine] = {}
        for name, path in (("", None), ("ngram", None), *((path.stem, path) for path in given.draft)):
            guessing = parse_speculation(None if path is not None else name or "off", path)
            options: dict[str, Any] = guessing.engine_options()
            if path is not None and given.forced:
                options |= {"speculate_tokens": given.forced, "speculate_always": 1}
            draft = stack.enter_context(opened_draft(guessing.draft, given.artifact))
            engines[name] = stack.enter_context(
                Engine(
                    artifact, num_threads=given.threads, max_num_seqs=sequences, weight_memory="copied",
                    draft=draft, **options,
                )
            )  # fmt: skip
            if draft is not None:
                engines[name].warm_draft()
        for kind in given.kinds:
            ways = [
                "",
                *(name for name in engines if name and (name != "ngram" or kind in LOOKUP_KINDS)),
            ]
            found = pairs(kind, given.texts, given.tokenizer, sequences, given.reach - 64)
            texts = [(prompt, answer[: given.most]) for prompt, answer in found]
            best: dict[str, Run] = {}
            for turn in range(given.turns):
                for way in ways:
                    run = decode(engines[way], artifact.info.vocab_size // 3, texts, given)
                    if turn <= 1 or run.rate > best[way].rate:
                        best[way] = run
            for way in ways[1:]:
                measured = Measured.of(kind, sequences, way, best[""], best[way])
                print(measured.line(), flush=True)
                yield measured


def decode(engine: Engine, names: int, texts: Sequence[Pair], given: argparse.Namespace) -> Run:
    """Runs the texts and sums up their steps without prefill."""
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    scripts = {}
    for number, (text, script) in enumerate(texts):
        prompt = script_prompt(script, text, given.reach, names, given.wrong, number)
        params = SamplingParams(temperature=0.0, max_tokens=len(script), ignore_eos=True)
        scripts[engine.submit(prompt, params)] = script
    said: dict[int, list[int]] = {request: [] for request in scripts}
    tokens, seconds, ended, before = 0, 0.0, 0, engine.stats
    guesses = given.forced * len(texts) if engine.has_draft else 0
    while ended < len(scripts):
        prefills, drafted, start = engine.stats.num_prefill_steps, engine.stats.drafted_tokens, clock()
        engine.step()
        took = clock() - start
        events = engine.poll()
        for event in events:
            ended += event.kind == "finished"
            if event.kind == "token":
                said[event.request_id].append(event.token_id)
        whole = guesses == 0 or engine.stats.drafted_tokens - drafted == guesses
        if engine.stats.num_prefill_steps == prefills and whole:
            seconds += took
            tokens += sum(event.kind == "token" for event in events)
    for request, script in scripts.items():
        if said[request] != script:
            raise RuntimeError("the model did not say its script: was it made with this --reach?")
    after = engine.stats
    steps = after.num_decode_steps - before.num_decode_steps
    drafted, accepted = (getattr(after, n) - getattr(before, n) for n in ("drafted_tokens", "accepted_tokens"))
    return Run(steps, tokens, seconds, drafted, accepted)


if __name__ == "__main__":
    raise SystemExit(main())
