"""The textual bucket spec.

    SPEC   = PHASE "=" GRIDS { "," PHASE "=" GRIDS }      each phase once; prefill and decode must be there
    PHASE  = "prefill" | "decode" | "mixed"
    GRIDS  = GRID { "+" GRID }                            the buckets of all of them
    GRID   = AXIS "x" AXIS [ "x" AXIS "blk" ]             batch, sequence in tokens, context in blocks (prefill only)
           | AXIS "x" AXIS "blk"                          decode only: batch, context in blocks
           | AXIS "x" AXIS [ "blk" ] "total"              decode only: batch, contexts of all sequences together
           | AXIS "x" AXIS                                of mixed: batch, tokens of all sequences together
    AXIS   = MIN ":" STEP ":" MAX                         ramp-up: min doubles until step, then multiples of step
           | MIN ":" STEP ":" MAX ":pad:" PCT [ ":" CAP ] ramp-up, thinned: at most PCT % (and CAP tokens) of padding
           | MIN ":" STEP ":" MAX ":exp" [ ":" LIMIT ]    LIMIT sizes in geometric progression, multiples of STEP
           | MIN ":exp:" MAX                              doubling
           | "[" N { "," N } "]"                          explicit
           | N
    MAX    = N | "max"                                    "max": max-num-seqs, max-model-len, or that in blocks;
                                                          new tokens: max-num-batched-tokens, where that is less;
                                                          of a total, max-num-seqs times the longest context

White space is ignored. A length axis in blocks is multiplied by the block size. MIN or N of the third, prefill axis may
be 0, "no context". llmc's graphs read the context of a prefill through its block table, so the third axis adds no
graph: it is checked, then dropped. Buckets of more new tokens than max-num-batched-tokens, if given, are left out.
Totals of less than a block per sequence are left out; totals beyond what a batch can fill are clipped. Bounds and
limits: `llmc.buckets.ladder`.
A SPEC that ends in .toml, .json or .txt names a file: `llmc.buckets.files`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llmc.graphs_format import PHASES

from .bucket import MAX_BUCKETS, PROMPT_PHASES, REQUIRED_PHASES, TOTAL, Bucket, BucketError, BucketLadder
from .files import read_file
from .grids import Limits, Pairs, check_phase, parse_grid, short

FILE_SUFFIXES = (".toml", ".json", ".txt")
_EXAMPLE = "prefill=1:32:4x128:128:1024,decode=1:128:4x128:128:2048"


def parse_spec(spec: str, limits: Limits | None = None, phases: tuple[str, ...] = REQUIRED_PHASES) -> BucketLadder:
    """Parses a spec, or reads a spec file (.toml, .json, .txt). The module's docstring has the grammar. phases: of the
    ladder.

    Raises BucketError, one sentence with the offending value, for a spec that is malformed, empty, or too large (more
    than 4096 buckets). Also raised for a duplicate phase or bucket, a missing phase, a limit missing in `limits`, or a
    phase without a bucket within max_num_batched_tokens.
    """
    text = spec.strip()
    limits = limits or Limits()
    if text.endswith(FILE_SUFFIXES):
        grids = read_file(Path(text), limits)
    else:
        grids = _parse_text(text, limits)
    grids = {phase: _within(phase, pairs, limits.max_num_batched_tokens) for phase, pairs in grids.items()}
    missing = [phase for phase in dict.fromkeys((*PROMPT_PHASES, *phases)) if phase not in grids]
    if missing:
        raise BucketError(f"bucket spec {short(spec)} has no {missing[0]} buckets: add {missing[0]}=BATCHxSEQ")
    total = sum(len(pairs) for pairs in grids.values())
    if total > MAX_BUCKETS:
        raise BucketError(
            f"bucket spec {short(spec)} asks for {total} buckets, the limit is {MAX_BUCKETS}: use larger steps"
        )
    found = {phase: tuple(Bucket(phase, *pair) for pair in pairs) for phase, pairs in grids.items()}
    return BucketLadder(**{"decode": (), **found}, phases=phases)


def format_spec(ladder: BucketLadder) -> str:
    """The spec text of a ladder; batches of a phase with equal lengths share a grid."""
    parts = []
    for phase in PHASES:
        lengths: dict[tuple[bool, int], list[int]] = {}
        for bucket in getattr(ladder, phase):
            lengths.setdefault((bucket.total, bucket.batch), []).append(bucket.seq)
        batches: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        for (total, batch), seqs in sorted(lengths.items()):
            batches.setdefault((total, tuple(seqs)), []).append(batch)
        if batches:
            grids = (
                f"[{_commas(rows)}]x[{_commas(seqs)}]{TOTAL if total else ''}"
                for (total, seqs), rows in batches.items()
            )
            parts.append(f"{phase}={'+'.join(grids)}")
    return ",".join(parts)


def _within(phase: str, pairs: Pairs, most: int | None) -> Pairs:
    """The pairs of at most `most` new tokens. Raises BucketError if there are none."""
    if most is None or not pairs or phase == "decode":
        return pairs

    def tokens(pair: tuple[int, ...]) -> int:
        return pair[1] if phase == "mixed" else pair[0] * pair[1]

    kept = [pair for pair in pairs if tokens(pair) <= most]
    if not kept:
        smallest = min(map(tokens, pairs))
        raise BucketError(
            f"the smallest {phase} bucket has {smallest} tokens but max-num-batched-tokens is {most}: "
            "give a smaller bucket or raise it"
        )
    return kept


def _commas(sizes: Iterable[int]) -> str:
    return ",".join(map(str, sizes))


def _parse_text(text: str, limits: Limits) -> dict[str, Pairs]:
    if not text:
        raise BucketError(f"bucket spec is empty: write it like {_EXAMPLE}")
    grids: dict[str, Pairs] = {}
    for part in _split_outside_brackets(text):
        phase, equals, grid = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise BucketError(f"bucket spec {short(text)} has a comma with nothing beside it: write it like {_EXAMPLE}")
        if not phase:
            raise BucketError(f"{short(part)} in the bucket spec names no phase: write it like {_EXAMPLE}")
        if not equals:
            raise BucketError(f"{short(part)} in the bucket spec is not PHASE=BATCHxSEQ: write it like {_EXAMPLE}")
        check_phase(phase)
        if phase in grids:
            raise BucketError(f"bucket spec gives {phase} twice: give each phase once, use a list for irregular sizes")
        grids[phase] = parse_grid(phase, grid, limits)
    return grids


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
        if depth not in (0, 1):
            break
    if depth != 0:
        raise BucketError(f"bucket spec {short(text)} has unbalanced brackets: write lists as [1,2,4]")
    return [*parts, text[start:]]
