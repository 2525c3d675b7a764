"""Environment variables as documented defaults of the bucket flags.

    LLMC_{PROMPT,DECODE}_{BS,SEQ,BLOCK}_BUCKET_{MIN,STEP,MAX,PAD_PERCENT,PAD_MAX}
    LLMC_MIXED_{BS,SEQ}_BUCKET_{MIN,STEP,MAX,PAD_PERCENT,PAD_MAX}

Each sets one number of an axis, as in Intel Gaudi's vLLM plugin (MIXED is llmc's own; `llmc.buckets.vllm` imports the
plugin's variables). BS: sequences. SEQ: tokens; for MIXED, of the whole step. BLOCK: context blocks per sequence; for
DECODE it replaces SEQ, for PROMPT it adds no graph (`llmc.buckets.spec`). An axis is ramp-up, thinned by PAD_PERCENT
and PAD_MAX (`llmc.buckets.ladder.padding_bounded`). Numbers that are not set, the token limit included, default to
`llmc.buckets.ladder.default_axes`. Flags take precedence over variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from .bucket import MAX_DIM, REQUIRED_PHASES, BucketError, BucketLadder
from .grids import Limits, in_tokens
from .ladder import default_axes, default_tokens, ladder_of_axes, padding_bounded, ramp_up

_AXES = {
    "PROMPT_BS": "prompt_bs",
    "PROMPT_SEQ": "prompt_seq",
    "PROMPT_BLOCK": "",
    "DECODE_BS": "decode_bs",
    "DECODE_SEQ": "decode_seq",
    "DECODE_BLOCK": "decode_seq",
    "MIXED_BS": "mixed_bs",
    "MIXED_SEQ": "mixed_seq",
}
_NUMBERS = ("MIN", "STEP", "MAX", "PAD_PERCENT", "PAD_MAX")
NAMES = tuple(f"LLMC_{axis}_BUCKET_{number}" for axis in _AXES for number in _NUMBERS)
_RENAMED = {"QUERY": "SEQ", "CTX": "BLOCK", "BATCH": "BS", "LIMIT": "MAX"}
_IMPORT = "; llmc buckets import takes over VLLM_ variables"
_LOOKS_ALIKE = 0.8


@dataclass(frozen=True, slots=True)
class LadderVariables:
    """The variables that are set: (axis, number, value), as ("PROMPT_BS", "MAX", 8). Each is checked alone only."""

    given: tuple[tuple[str, str, int], ...]

    @property
    def names(self) -> str:
        """Up to three names of the variables, for errors."""
        names = [f"LLMC_{axis}_BUCKET_{number}" for axis, number, _ in self.given]
        return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")

    def ladder(self, limits: Limits, phases: tuple[str, ...] = REQUIRED_PHASES) -> BucketLadder:
        """The default ladder for `limits`, modified by the variables. `limits` must be complete except for the token
        limit.

        phases: of the ladder. Raises BucketError naming the variables of an impossible axis.
        """
        seqs, longest, block = limits.max_num_seqs, limits.max_model_len, limits.block_size
        if seqs is None or longest is None or block is None:
            raise BucketError("ladders of the environment need max-num-seqs, max-model-len and the block size")
        tokens = limits.max_num_batched_tokens
        defaults = default_axes(seqs, longest, block, tokens)
        sizes = {name: ramp_up(*axis) for name, axis in defaults.items()}
        by_axis: dict[str, dict[str, int]] = {}
        for axis, number, value in self.given:
            by_axis.setdefault(axis, {})[number] = value
        for axis, values in by_axis.items():
            name = _AXES[axis]
            try:
                if axis == "PROMPT_BLOCK":
                    _sizes(values, (1, 1, -(-longest // block)), zero=True)
                elif axis == "DECODE_BLOCK":
                    start, step, end = (-(-size // block) for size in defaults[name])
                    _check_blocks(values, end, longest)
                    sizes[name] = in_tokens(_sizes(values, (start, step, end)), limits)
                else:
                    sizes[name] = _sizes(values, defaults[name])
            except BucketError as error:
                set_here = ", ".join(f"LLMC_{axis}_BUCKET_{number}={values[number]}" for number in values)
                raise BucketError(f"{set_here}: {error}") from error
        most = default_tokens(longest) if tokens is None else tokens
        try:
            ladder = ladder_of_axes(sizes, most, phases)
        except BucketError as error:
            raise BucketError(f"{self.names}: {error}") from error
        if not ladder.mixed and any(axis.startswith("MIXED") for axis in by_axis):
            raise BucketError(
                f"{self.names}: no mixed bucket has two sequences and at most {most} tokens: change or unset the "
                "LLMC_MIXED_ variables"
            )
        return ladder


def read_environment(environ: Mapping[str, str]) -> LadderVariables | None:
    """The ladder variables in `environ`; None if none is set.

    Raises BucketError for a value that is no integer, for DECODE with both SEQ and BLOCK, and for PAD_MAX without
    PAD_PERCENT. Also raised for an unknown name that contains BUCKET or resembles a known one.
    """
    given: list[tuple[str, str, int]] = []
    for name, text in sorted(environ.items()):
        if name not in NAMES:
            _refuse_unknown(name)
            continue
        if not re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) or int(text) > MAX_DIM:
            raise BucketError(f"{name} is {text[:40]!r}: set a whole number up to {MAX_DIM} or unset it")
        axis, _, number = name.removeprefix("LLMC_").partition("_BUCKET_")
        given.append((axis, number, int(text)))
    if not given:
        return None
    axes = {axis for axis, _, _ in given}
    if {"DECODE_SEQ", "DECODE_BLOCK"} <= axes:
        raise BucketError("both LLMC_DECODE_SEQ_BUCKET_* and LLMC_DECODE_BLOCK_BUCKET_* are set: set tokens or blocks")
    for axis in sorted(axes):
        numbers = {number for of, number, _ in given if of == axis}
        if "PAD_MAX" in numbers and "PAD_PERCENT" not in numbers:
            raise BucketError(f"LLMC_{axis}_BUCKET_PAD_MAX caps what _PAD_PERCENT bounds: set both, or neither")
    return LadderVariables(tuple(given))


def nearest(name: str, known: tuple[str, ...], cutoff: float = 0.0) -> str | None:
    """The name in `known` most similar to `name`."""
    return next(iter(get_close_matches(name, known, 1, cutoff)), None)


def _refuse_unknown(name: str) -> None:
    upper = name.upper()
    if not upper.startswith("LLMC_"):
        return
    if "BUCKET" not in upper and nearest(upper, NAMES, _LOOKS_ALIKE) is None:
        return
    if not any(phase in upper for phase in ("PROMPT", "DECODE", "MIXED", "PREFILL")):
        raise BucketError(
            f"environment variable {name[:80]} is unknown: variables are LLMC_{{PROMPT,DECODE,MIXED}}_{{BS,SEQ,BLOCK}}_"
            "BUCKET_{MIN,STEP,MAX,PAD_PERCENT,PAD_MAX}, other ladders are written with --buckets" + _IMPORT
        )
    wanted = upper.replace("PREFILL", "PROMPT")
    for old, new in _RENAMED.items():
        wanted = re.sub(rf"_{old}(?=_|$)", f"_{new}", wanted)
    raise BucketError(f"environment variable {name[:80]} is unknown: did you mean {nearest(wanted, NAMES)}?")


def _sizes(values: Mapping[str, int], default: tuple[int, int, int], zero: bool = False) -> tuple[int, ...]:
    """Sizes of an axis; an unset MIN is the default, or MAX if that is less."""
    start, step, end = default
    end = values.get("MAX", end)
    start = values.get("MIN", min(start, end))
    step = values.get("STEP", step)
    if zero and start == 0:
        start = max(1, min(step, end))
    if zero and end == 0:
        return (0,)
    if "PAD_PERCENT" in values:
        return padding_bounded(start, step, end, values["PAD_PERCENT"], values.get("PAD_MAX"))
    return ramp_up(start, step, end)


def _check_blocks(values: Mapping[str, int], most: int, longest: int) -> None:
    """Rejects block counts of the whole batch, as in VLLM_DECODE_BLOCK_BUCKET_*: here they are per sequence."""
    for number in ("MIN", "MAX"):
        if values.get(number, 0) > most:
            raise BucketError(
                f"{number} counts the blocks of one sequence and max-model-len {longest} is {most} blocks: set at most "
                f"{most}, or raise --max-model-len{_IMPORT}, which count the blocks of the batch"
            )
