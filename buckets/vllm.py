"""Imports ladders of Intel Gaudi's vLLM plugin: its variables → its shapes → llmc's buckets, with reasons.

    VLLM_PROMPT_{BS,QUERY,SEQ,CTX}_BUCKET_{MIN,STEP,MAX,PAD_MAX,PAD_PERCENT}     SEQ: the older name of QUERY
    VLLM_DECODE_{BS,BLOCK}_BUCKET_{MIN,STEP,MAX,PAD_MAX,PAD_PERCENT}
    VLLM_BUCKETING_STRATEGY exp, lin or pad; VLLM_EXPONENTIAL_BUCKETING wins over it; VLLM_BUCKETING_FROM_FILE over both
    and the switches of `_SWITCHES`

The shapes are the plugin's own (`llmc.buckets.vllm_shapes`). A prompt shape becomes a prefill bucket of its batch and
query length, whatever its context. A decode shape counts blocks of the whole batch, a decode bucket tokens of each
sequence, so the former is divided. Sizes that no request could fill are clipped. The plugin compiles missing shapes on
demand; llmc does not. So if no decode bucket holds max_num_seqs sequences of max_model_len tokens, one is added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .bucket import MAX_DIM, Bucket, BucketError, BucketLadder, whole_blocks
from .environment import nearest
from .gaudi import parse_shapes
from .vllm_shapes import STRATEGIES, PluginServer, PluginShapes, Shape, plugin_shapes

_AXES = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
_NUMBERS = ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
_AXIS_NAMES = {f"VLLM_{axis}_BUCKET_{number}": (axis, number) for axis in _AXES for number in _NUMBERS}
_STRATEGY, _EXPONENTIAL, _FILE = "VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING", "VLLM_BUCKETING_FROM_FILE"
_SWITCHES = {
    _STRATEGY: "the rule of every axis",
    _EXPONENTIAL: "the older name of the strategy: true is exp, false is lin",
    _FILE: "the shapes themselves, in place of a strategy",
    "VLLM_CONTIGUOUS_PA": "decode blocks reach the device's count of blocks",
    "VLLM_PREFIX_CACHING": "without it attention is contiguous: decode blocks reach the device's count",
    "VLLM_MERGED_PREFILL": "prompts of a step are one packed row; a prefill bucket holds one prompt of that length",
    "PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "long queries without context come in whole slices",
    "PT_HPU_SDPA_BC_FACTOR": "tokens of a slice, where slices are on",
    "VLLM_FUSEDSDPA_SLIDE_THLD": "tokens from which queries are sliced, where slices are on",
    "VLLM_ENABLE_BUCKETING": "buckets at all",
    "VLLM_SKIP_WARMUP": "none: llmc compiles before it serves",
    "VLLM_MULTIMODAL_BUCKETS": "none: dropped, llmc serves text and has no vision towers",
}
NAMES = (*_AXIS_NAMES, *_SWITCHES)
_MEANING = {
    "PROMPT_BS": "prompts of a step: batch of prefill buckets",
    "PROMPT_QUERY": "new tokens of a prompt: length of prefill buckets",
    "PROMPT_SEQ": "the older name of QUERY, new tokens of a prompt: length of prefill buckets",
    "PROMPT_CTX": "blocks of context of a prompt: no graph here, a prefill graph reads any context",
    "DECODE_BS": "sequences of a step: batch of decode buckets",
    "DECODE_BLOCK": "blocks of the whole batch: the total of contexts, or divided by the batch",
}
_TRUE, _FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off", "")
_MOST_COMPARED = 100_000

ReadFile = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """Flags of the server. Lengths in tokens. num_blocks: None for enough blocks for every sequence at full length.

    totals: decode buckets are for the total of contexts, as the plugin means them.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None = None
    totals: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "num_blocks"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_DIM:
                raise BucketError(f"--{name.replace('_', '-')} {value} is out of range: use 1 to {MAX_DIM}")

    @property
    def device_blocks(self) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        return -(-self.max_model_len // self.block_size) * self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Effect:
    """A variable that is set, its meaning, and its effect in the plugin and here."""

    variable: str
    value: str
    meaning: str
    effect: str


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import. shapes: the plugin's. ladder: llmc's. changes: what was dropped or added, and why."""

    server: PluginServer
    shapes: PluginShapes
    ladder: BucketLadder
    effects: tuple[Effect, ...]
    changes: tuple[str, ...]


def import_vllm(environ: Mapping[str, str], limits: VllmLimits, read_file: ReadFile) -> Imported:
    """The ladder of a server started with `environ` and `limits`. read_file: returns the text of a bucket file.

    Raises BucketError for an unknown or non-numeric variable, and where the plugin itself would fail.
    """
    given = _known(environ)
    server = plugin_server(given, limits, read_file)
    shapes = plugin_shapes(server)
    ladder, changes = map_shapes(shapes, server)
    effects = tuple(
        Effect(name, value, _meaning(name), _effect(name, given, limits, read_file, server, shapes, ladder))
        for name, value in given.items()
    )
    return Imported(server, shapes, ladder, effects, changes)


def plugin_server(given: Mapping[str, str], limits: VllmLimits, read_file: ReadFile) -> PluginServer:
    """The inputs of the plugin's lists. Raises BucketError."""
    if not _switch(given, "VLLM_ENABLE_BUCKETING", True):
        raise BucketError("VLLM_ENABLE_BUCKETING turns buckets off, so there are none to import: unset it")
    numbers = {
        f"{axis}_{number}": _whole(name, given[name]) for name, (axis, number) in _AXIS_NAMES.items() if name in given
    }
    strategy = given.get(_STRATEGY, "exp")
    if strategy not in STRATEGIES:
        raise BucketError(f"{_STRATEGY} is {strategy[:40]!r}: set exp, lin or pad")
    if _EXPONENTIAL in given:
        strategy = "exp" if _switch(given, _EXPONENTIAL, True) else "lin"
    contiguous = _switch(given, "VLLM_CONTIGUOUS_PA", False)
    if "VLLM_CONTIGUOUS_PA" not in given:
        contiguous = not _switch(given, "VLLM_PREFIX_CACHING", True)
    slices = None
    if _switch(given, "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", False):
        threshold, size = "VLLM_FUSEDSDPA_SLIDE_THLD", "PT_HPU_SDPA_BC_FACTOR"
        slices = (_whole(threshold, given.get(threshold, "8192")), max(1, _whole(size, given.get(size, "1024"))))
    server = PluginServer(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_blocks=limits.device_blocks,
        strategy=strategy,
        contiguous=contiguous,
        merged=_switch(given, "VLLM_MERGED_PREFILL", False),
        numbers=numbers,
        slices=slices,
        totals=limits.totals,
    )
    name = given.get(_FILE)
    if not name:
        return server
    found = parse_shapes(read_file(name), name)
    prompt = sorted(shape for shape in found if shape[1] != 1)
    return replace(server, shapes=(prompt, sorted(shape for shape in found if shape[1] == 1)))


def map_shapes(shapes: PluginShapes, server: PluginServer) -> tuple[BucketLadder, tuple[str, ...]]:
    """llmc's ladder for the plugin's shapes, with a sentence per kind of change. Raises BucketError."""
    seqs, longest, block = server.max_num_seqs, server.max_model_len, server.block_size
    changes = []

    def cut(phase: str, found: tuple[Shape, ...]) -> list[Shape]:
        steps = [shape for shape in found if shape[0] > 0 and shape[1] > 0]
        if len(steps) < len(found):
            changes.append(f"{phase}: dropped {len(found) - len(steps)} shapes of no sequence or no token")
        for count, what in (
            (sum(shape[0] > seqs for shape in steps), f"more than {seqs} sequences are cut to --max-num-seqs"),
            (sum(shape[1] > longest for shape in steps), f"more than {longest} tokens are cut to --max-model-len"),
        ):
            if count:
                changes.append(f"{phase}: {count} shapes of {what}")
        return [(min(batch, seqs), min(query, longest), context) for batch, query, context in steps]

    prompts, decodes = cut("prompt", shapes.prompt), cut("decode", shapes.decode)
    prefill = {(batch, query) for batch, query, _ in prompts}
    if len(prefill) < len(prompts):
        changes.append(
            f"prefill: {len(prompts)} shapes are {len(prefill)} buckets, for a context adds no graph: a prefill graph "
            "reads any through its block table"
        )
    decode, rule = _decode_buckets(decodes, server)
    if len(decode) < len(decodes):
        changes.append(f"decode: {len(decodes)} shapes are {len(decode)} buckets: {rule}")
    most = whole_blocks(longest, block) * seqs
    largest = Bucket("decode", seqs, most, total=True) if server.totals else Bucket("decode", seqs, longest)
    if largest not in decode:
        decode.add(largest)
        changes.append(
            f"decode: added {largest.batch}x{largest.length}, so that every step has a bucket: llmc compiles nothing "
            "while serving"
        )
    changes.append("mixed: none, for the plugin has no such steps; `llmc compile` adds one with --add")
    return BucketLadder(tuple(Bucket("prefill", *pair) for pair in prefill), tuple(decode)), tuple(changes)


def _decode_buckets(shapes: list[Shape], server: PluginServer) -> tuple[set[Bucket], str]:
    """(buckets of decode shapes, the rule as half a sentence)."""
    longest, block = server.max_model_len, server.block_size
    if server.totals:
        # A graph has a block for each sequence, and no use for more than all sequences have at their longest.
        found = {
            Bucket("decode", batch, min(max(blocks, batch), batch * server.blocks_per_seq) * block, total=True)
            for batch, _, blocks in shapes
        }
        return found, "blocks of the batch are the total of contexts, one a sequence at least"
    pairs = {(batch, min(longest, max(1, -(-blocks // batch)) * block)) for batch, _, blocks in shapes}
    return {Bucket("decode", *pair) for pair in pairs}, (
        "blocks of the batch, divided by it and rounded up, are the context of each sequence, and none is longer than "
        f"{longest} tokens"
    )


def parse_env_file(text: str, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables in a file of NAME=value lines, as docker compose reads it. name: quoted in errors.

    `#` starts a comment, at the start of a line or after a space. Values may be quoted. A bare NAME takes its value
    from `environ`. The last line of a name counts. Raises BucketError naming the line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip().removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        variable, equals, value = (part.strip() for part in line.partition("="))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise BucketError(f"{name}:{number}: {line[:60]!r} is not NAME=value: write one variable a line")
        if not equals:
            if variable in environ:
                found[variable] = environ[variable]
            continue
        quoted = re.match(r"""(["'])(.*?)\1\s*(#.*)?$""", value)
        found[variable] = quoted[2] if quoted else re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()
    return found


def _known(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that concern buckets, sorted. Raises BucketError for an unknown one that resembles them."""
    known = {}
    for name, value in sorted(environ.items()):
        if name in NAMES:
            known[name] = value.strip()
        elif re.match(r"VLLM_.*BUCKET|VLLM_(PROMPT|DECODE)_(BS|QUERY|SEQ|CTX|BLOCK)_", name, re.IGNORECASE):
            raise BucketError(
                f"environment variable {name[:80]} is unknown to the plugin: did you mean "
                f"{nearest(name.upper(), NAMES)}? Correct or unset it"
            )
    return known


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) > MAX_DIM:
        raise BucketError(f"{name} is {text[:40]!r}: set a whole number up to {MAX_DIM} or unset it")
    return int(text)


def _switch(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in (*_TRUE, *_FALSE):
        raise BucketError(f"{name} is {text[:40]!r}: set true or false")
    return text.lower() in _TRUE


def _meaning(name: str) -> str:
    if name in _SWITCHES:
        return _SWITCHES[name]
    axis, number = _AXIS_NAMES[name]
    unit = {"PAD_MAX": "most padding, ", "PAD_PERCENT": "most padding in %, "}.get(number, "")
    return f"{unit}{_MEANING[axis]}"


def _effect(
    name: str,
    given: Mapping[str, str],
    limits: VllmLimits,
    read_file: ReadFile,
    server: PluginServer,
    shapes: PluginShapes,
    ladder: BucketLadder,
) -> str:
    """Compares the lists with and without the variable, which is more reliable than a rule of thumb."""
    if len(shapes.prompt) + len(shapes.decode) > _MOST_COMPARED:
        return "not compared: too many shapes"
    try:
        other_server = plugin_server({key: value for key, value in given.items() if key != name}, limits, read_file)
        other = plugin_shapes(other_server)
        other_ladder, _ = map_shapes(other, other_server)
    except BucketError as error:
        return f"needed: without it, {error}"
    if (other.prompt, other.decode) == (shapes.prompt, shapes.decode):
        return f"no effect: {_why_none(name, given, server)}"
    parts = []
    for phase, here, there in (
        ("prompt", shapes.prompt, other.prompt),
        ("decode", shapes.decode, other.decode),
        ("prefill graph", ladder.prefill, other_ladder.prefill),
        ("decode graph", ladder.decode, other_ladder.decode),
    ):
        more, fewer = len(set(here) - set(there)), len(set(there) - set(here))
        if more or fewer:
            parts.append(f"{phase}s +{more} −{fewer}" if "graph" in phase else f"{phase} shapes +{more} −{fewer}")
    if ladder == other_ladder:
        parts.append("no graph here")
    return ", ".join(parts)


def _why_none(name: str, given: Mapping[str, str], server: PluginServer) -> str:
    if name not in _AXIS_NAMES:
        return "the lists are the same without it"
    axis, number = _AXIS_NAMES[name]
    if server.shapes is not None:
        return f"{_FILE} gives the shapes"
    if server.strategy == "exp":
        return f"the exponential strategy has its own numbers; {_STRATEGY}=lin or pad reads it"
    if number.startswith("PAD") and server.strategy == "lin":
        return f"{_STRATEGY}=pad alone reads it"
    if axis == "PROMPT_SEQ" and f"VLLM_PROMPT_QUERY_BUCKET_{number}" in given:
        return f"VLLM_PROMPT_QUERY_BUCKET_{number} wins over it"
    return "the lists are the same without it"
