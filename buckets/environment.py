"""Environment variables as documented defaults of the bucket flags.

    LLMC_{PROMPT,DECODE}_{BS,SEQ,BLOCK}_BUCKET_{MIN,STEP,MAX}
    LLMC_MIXED_{BS,SEQ}_BUCKET_{MIN,STEP,MAX}

They set one number of a ramp-up axis each, as Intel Gaudi's vLLM plugin has them with the prefix VLLM_
(vllm_gaudi/extension/bucketing/linear.py; MIXED is llmc's own). BS: sequences. SEQ: tokens, for MIXED those of the
whole step. BLOCK: blocks of context of one sequence; for DECODE it takes the place of SEQ, for PROMPT it adds no graph
(`llmc.buckets.spec`). A number that no variable sets has its default from `llmc.buckets.ladder.default_axes`. A flag
always wins over them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .bucket import MAX_DIM, BucketError
from .ladder import default_axes

_NAME = re.compile(r"LLMC_(?:(PROMPT|DECODE)_(BS|SEQ|BLOCK)|(MIXED)_(BS|SEQ))_BUCKET_(MIN|STEP|MAX)", re.ASCII)
_LOOKS_LIKE = re.compile(r"LLMC_.*_BUCKET_(MIN|STEP|MAX|LIMIT)", re.ASCII)
_UNKNOWN_LEN = 1 << 12
_MIXED_AXES = (("BS", "mixed_bs"), ("SEQ", "mixed_seq"))


def spec_from_environment(
    environ: Mapping[str, str], max_num_seqs: int, max_model_len: int | None, block_size: int
) -> str | None:
    """The spec (`llmc.buckets.spec`) that the variables of `environ` ask for, or None when none of them is set.

    max_model_len, tokens, may be None when the model is not known yet: the spec then says `max`. Raises BucketError
    for a value that is not a whole number, a misspelt variable, or DECODE with both SEQ and BLOCK.
    """
    given: dict[tuple[str, str], dict[str, int]] = {}
    for name, text in sorted(environ.items()):
        match = _NAME.fullmatch(name)
        if match is None:
            if _LOOKS_LIKE.fullmatch(name):
                raise BucketError(
                    f"environment variable {name} is unknown: use LLMC_{{PROMPT,DECODE}}_{{BS,SEQ,BLOCK}}_BUCKET_"
                    "{MIN,STEP,MAX} or LLMC_MIXED_{BS,SEQ}_BUCKET_{MIN,STEP,MAX}"
                )
            continue
        if not re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) or int(text) > MAX_DIM:
            raise BucketError(f"{name} is {text[:40]!r}: set a whole number up to {MAX_DIM} or unset it")
        given.setdefault((match[1] or match[3], match[2] or match[4]), {})[match[5]] = int(text)
    if not given:
        return None
    if ("DECODE", "SEQ") in given and ("DECODE", "BLOCK") in given:
        raise BucketError("both LLMC_DECODE_SEQ_BUCKET_* and LLMC_DECODE_BLOCK_BUCKET_* are set: set tokens or blocks")
    axes = default_axes(max_num_seqs, max_model_len or _UNKNOWN_LEN, block_size)
    start, step, length = axes["seq"]
    longest = "max" if max_model_len is None else str(length)
    blocks = "max" if max_model_len is None else str(-(-length // block_size))

    def axis(phase: str, kind: str, minimum: int, step: int, maximum: str) -> str:
        values = given.get((phase, kind), {})
        return f"{values.get('MIN', minimum)}:{values.get('STEP', step)}:{values.get('MAX', maximum)}"

    prompt_bs, decode_bs = axes["prompt_bs"], axes["decode_bs"]
    prefill = f"{axis('PROMPT', 'BS', *prompt_bs[:2], str(prompt_bs[2]))}x{axis('PROMPT', 'SEQ', start, step, longest)}"
    if ("PROMPT", "BLOCK") in given:
        prefill += f"x{axis('PROMPT', 'BLOCK', 0, 1, blocks)}blk"
    decode = axis("DECODE", "BS", *decode_bs[:2], str(decode_bs[2]))
    if ("DECODE", "BLOCK") in given:
        decode += f"x{axis('DECODE', 'BLOCK', -(-start // block_size), -(-step // block_size), blocks)}blk"
    else:
        decode += f"x{axis('DECODE', 'SEQ', start, step, longest)}"
    mixed = "x".join(axis("MIXED", kind, *axes[name][:2], str(axes[name][2])) for kind, name in _MIXED_AXES)
    return f"prefill={prefill},decode={decode},mixed={mixed}"
