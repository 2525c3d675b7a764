"""One memory budget for weights, graphs and KV cache: which graphs are kept, and how large the KV pool may be.

The rules are those of vLLM on Intel Gaudi (memory utilization, VLLM_GRAPH_RESERVED_MEM, VLLM_GRAPH_PROMPT_RATIO), with
two differences. Graphs of llmc share one arena, so a set of them takes the largest arena, not the sum. And memory that
the graphs leave unused goes to the KV cache instead of lying idle.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmc.mpi_loader import mpi_rank
from llmc.runtime.binding import ArtifactInfo, GraphInfo, LlmcError
from llmc.runtime.context_limit import least_kv_bytes
from llmc.runtime.warm_up.draft_memory import DraftMemory, kv_beside_draft

# Bytes of a command with its pointers resolved (cpu_program.h), and of a row's int32 inputs: id, position, slot,
# sequence.
COMMAND_BYTES = 128
_TOKEN_INPUT_BYTES = 16
_FLOAT_BYTES = _INT_BYTES = 4


class BudgetError(ValueError):
    """Budgets that contradict each other or the artifact. The message is one sentence with the values and a way out."""


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Shares, 0 … 1.

    utilization: share of the available memory. graph_reserved: share for graphs, of what the weights leave of that.
    graph_prompt_ratio: share of the graph memory for prefill and mixed graphs. kv_bytes: size of the KV pool; 0: all
    that is left. max_num_seqs, num_states: of the engine; 0 for its defaults.
    """

    utilization: float = 0.9
    graph_reserved: float = 0.1
    graph_prompt_ratio: float = 0.3
    kv_bytes: int = 0
    max_num_seqs: int = 0
    num_states: int = 0

    def __post_init__(self) -> None:
        for name, value, may_be_zero in (
            ("memory-utilization", self.utilization, False),
            ("graph-reserved-memory", self.graph_reserved, False),
            ("graph-prompt-ratio", self.graph_prompt_ratio, True),
        ):
            if not (0 < value <= 1 or (may_be_zero and value == 0)):
                choice = "0 to 1" if may_be_zero else "more than 0 and at most 1"
                raise BudgetError(f"{name} {value:g} is out of range: use {choice}")


def budget_of(
    utilization: float | None,
    graph_reserved: float | None,
    graph_prompt_ratio: float | None,
    kv_bytes: int = 0,
    *,
    max_num_seqs: int = 0,
    num_states: int = 0,
) -> BudgetOptions | None:
    """The requested budget, with defaults for None. None without a utilization. Raises BudgetError."""
    given = {"graph_reserved": graph_reserved, "graph_prompt_ratio": graph_prompt_ratio}
    chosen = {name: value for name, value in given.items() if value is not None}
    if utilization is not None:
        return BudgetOptions(
            utilization=utilization, kv_bytes=kv_bytes, max_num_seqs=max_num_seqs, num_states=num_states, **chosen
        )
    for name, value in (("graph-reserved-memory", graph_reserved), ("graph-prompt-ratio", graph_prompt_ratio)):
        if value is not None:
            raise BudgetError(f"{name} {value:g} divides a budget: give memory-utilization, too")
    return None


@dataclass(frozen=True, slots=True)
class Recordings:
    """mib: device memory for recordings of graphs. prompt_mib: of that, for graphs of prefill and mixed steps. order:
    all graphs by index, the ones to record first."""

    mib: int
    prompt_mib: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """The decision. kept, dropped: graph indices, ascending. graph_bytes: of the kept graphs. lines: the calculation,
    step by step. recordings: on a device whose recordings of graphs take memory of its own; None elsewhere."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    graph_bytes: int
    kv_bytes: int
    lines: tuple[str, ...]
    recordings: Recordings | None = None

    @property
    def device_options(self) -> dict[str, int | str]:
        """Options of the device that follow from the budget."""
        if self.recordings is None:
            return {}
        order = ",".join(map(str, self.recordings.order))
        return {
            "graph_mib": self.recordings.mib,
            "graph_prompt_mib": self.recordings.prompt_mib,
            "graph_order": order,
        }


def graph_set_bytes(graphs: Iterable[GraphInfo], vocab_size: int, cut_rows: int = 0, states_width: int = 0) -> int:
    """Bytes of a set of graphs: one arena and one set of inputs, logits and hidden states, each as large as its largest
    user, plus the commands of all graphs.

    cut_rows: rows from which on a step may have a second part, with the same once more (`least_cut_rows`); 0: none has.
    states_width: of a row of hidden states, which a drafting head or images need; 0: there are none.
    """
    kept = tuple(graphs)
    commands = sum(graph.num_commands for graph in kept) * COMMAND_BYTES
    found = _step_bytes(kept, vocab_size, states_width) + commands
    if cut_rows:
        cut = (graph for graph in kept if graph.max_tokens >= cut_rows)
        found += _step_bytes(cut, vocab_size, states_width) + commands
    return found


def _step_bytes(graphs: Iterable[GraphInfo], vocab_size: int, states_width: int) -> int:
    """What a step uses: arena, inputs, logits and hidden states."""
    arena = inputs = samples = tokens = 0
    for graph in graphs:
        arena = max(arena, graph.arena_bytes)
        table = graph.max_blocks or graph.max_seqs * graph.max_blocks_per_seq
        rows = table + 2 * graph.max_seqs + graph.max_samples
        inputs = max(inputs, graph.max_tokens * _TOKEN_INPUT_BYTES + rows * _INT_BYTES)
        samples, tokens = max(samples, graph.max_samples), max(tokens, graph.max_tokens)
    return arena + inputs + (samples * vocab_size + tokens * states_width) * _FLOAT_BYTES


def base_graphs(graphs: Sequence[GraphInfo], *, smallest: bool = False) -> tuple[int, ...]:
    """Indices of a minimal set of graphs that can serve every request, possibly in larger graphs than necessary.

    It holds the decode graphs with the most sequences and with the longest context, and one prefill graph: the largest,
    or with `smallest` the smallest.
    """
    numbers = range(len(graphs))
    decode = [i for i in numbers if graphs[i].phase == "decode"]
    prompt = [i for i in numbers if graphs[i].phase == "prefill"] or [i for i in numbers if i not in decode]
    found = set()
    if decode:

        def blocks(i: int) -> int:
            """KV blocks of all sequences together."""
            return graphs[i].max_blocks or graphs[i].max_seqs * graphs[i].max_blocks_per_seq

        found.add(max(decode, key=lambda i: (graphs[i].max_seqs, blocks(i), -i)))
        found.add(max(decode, key=lambda i: (graphs[i].max_blocks_per_seq, graphs[i].max_seqs, blocks(i), -i)))
    if prompt:
        # A prompt runs in chunks, so any size works, but the graph must hold its context.
        longest = max(graphs[i].max_blocks_per_seq for i in prompt)
        reaching = [i for i in prompt if graphs[i].max_blocks_per_seq == longest]
        sign = 1 if smallest else -1
        found.add(min(reaching, key=lambda i: (sign * graphs[i].max_tokens, i)))
    return tuple(sorted(found))


def size_order(graphs: Sequence[GraphInfo]) -> tuple[int, ...]:
    """All graphs by index: the base first, then prompts by tokens and decode by batch, the largest batch first. This is
    the order of a warm-up without known traffic."""

    def rank(index: int) -> tuple[int, int, int, int]:
        graph = graphs[index]
        if graph.phase == "decode":
            return 1, -graph.batch, graph.seq, 0
        tokens = graph.seq if graph.phase == "mixed" else graph.batch * graph.seq
        return 0, tokens, graph.seq, graph.batch

    base = set(base_graphs(graphs))
    return tuple(sorted(range(len(graphs)), key=lambda i: (i not in base, *rank(i))))


def plan_budget(
    info: ArtifactInfo,
    graphs: Sequence[GraphInfo],
    order: Sequence[int],
    available: int,
    options: BudgetOptions,
    draft: DraftMemory | None = None,
    cut_rows: int = 0,
    tower_bytes: int = 0,
) -> Budget:
    """Plans for `available` bytes, shared equally by the ranks of a host. order: all graphs by index, the ones to keep
    first. cut_rows: as for `graph_set_bytes`. tower_bytes: of what encodes images. Raises BudgetError."""
    lines, weight_bytes = [], info.weight_bytes
    if info.num_ranks > 1:
        mpi = mpi_rank()
        here = info.num_ranks if mpi is None else mpi.local_ranks
        lines.append(f"{here} of {info.num_ranks} ranks are on this host: each has {size_text(available // here)}")
        available //= here
        weight_bytes = info.rank_weight_bytes
    usable = int(available * options.utilization)
    lines.append(
        f"{size_text(available)} available, memory-utilization {options.utilization:g}: {size_text(usable)} to use"
    )
    for_adapters = info.adapter_slots * info.adapter_bytes
    for_draft = 0 if draft is None else draft.fixed
    left = usable - weight_bytes - for_adapters - for_draft - tower_bytes
    # Where a prompt runs in one step, the largest graph serves all of them.
    base = base_graphs(graphs, smallest=not info.whole_prompts)
    memory = _GraphMemory(graphs, info.vocab_size, cut_rows, info.states_width)
    least = memory.of(base)
    least_kv = least_kv_of(info, options, draft)
    room = f"room for adapters ({for_adapters}), " if for_adapters else ""
    room += f"the draft's weights and graphs ({for_draft}), " if for_draft else ""
    room += f"what encodes images ({tower_bytes}), " if tower_bytes else ""
    if left < least + least_kv:
        raise BudgetError(
            f"memory-utilization {options.utilization:g} of {available} bytes is {usable}, but weights "
            f"({weight_bytes}), {room}one graph of each phase ({least}) and the KV cache of one sequence "
            f"({least_kv}) need {usable - left + least + least_kv}: raise it{fewer_states(options)} or free memory"
        )
    reserved = int(left * options.graph_reserved)
    prompt_share = int(reserved * options.graph_prompt_ratio)
    held = f", room for adapters {size_text(for_adapters)}" if for_adapters else ""
    held += draft_text(draft) + tower_text(tower_bytes)
    lines.append(f"weights {size_text(weight_bytes)}{held}, {size_text(left)} left")
    lines.append(
        f"graph-reserved-memory {options.graph_reserved:g}: {size_text(reserved)} for graphs, of which "
        f"graph-prompt-ratio {options.graph_prompt_ratio:g} gives {size_text(prompt_share)} to prompts and "
        f"{size_text(reserved - prompt_share)} to decode"
    )
    if reserved < least:
        raise BudgetError(
            f"graph-reserved-memory {options.graph_reserved:g} of {left} bytes is {reserved}, but one graph of each "
            f"phase needs {least}: use at least {_share_up(least, left):g}"
        )
    kept = _keep(memory, order, base, reserved, prompt_share)
    graph_bytes = memory.of(kept)
    kv_bytes = left - graph_bytes
    if kv_bytes < least_kv:
        raise BudgetError(
            f"graphs take {graph_bytes} of {left} bytes and leave {kv_bytes} for the KV cache, but one sequence needs "
            f"{least_kv}: lower graph-reserved-memory {options.graph_reserved:g} or raise memory-utilization "
            f"{options.utilization:g}"
        )
    kv_bytes = kv_beside_draft(kv_bytes, info, draft)
    if options.kv_bytes > kv_bytes:
        raise BudgetError(
            f"kv-bytes {options.kv_bytes} is more than the {kv_bytes} that weights and graphs leave of "
            f"memory-utilization {options.utilization:g}: lower one or raise the other"
        )
    kv_bytes = options.kv_bytes or most_kv(kv_bytes, info)
    dropped = tuple(i for i in range(len(graphs)) if i not in kept)
    lines += _graph_lines(memory, kept, graph_bytes)
    lines.append(kv_text(kv_bytes, info, options, draft))
    return Budget(tuple(sorted(kept)), dropped, graph_bytes, kv_bytes, tuple(lines))


def draft_text(draft: DraftMemory | None) -> str:
    """Text on the fixed memory of a draft; it follows the model's weights."""
    return "" if draft is None else f", draft {size_text(draft.weights)} and {size_text(draft.graphs)} for its graphs"


def tower_text(tower_bytes: int) -> str:
    """Text on the memory of what encodes images; it follows the model's weights and the draft."""
    return f", encoding of images {size_text(tower_bytes)}" if tower_bytes else ""


def most_kv(room: int, info: ArtifactInfo) -> int:
    """Bytes of `room` that KV blocks can use. With states, an engine leaves the rest free by itself."""
    return room if info.state_bytes else min(room, info.max_kv_blocks * info.kv_block_bytes)


def least_kv_of(info: ArtifactInfo, options: BudgetOptions, draft: DraftMemory | None) -> int:
    """Bytes of KV cache that one sequence of the longest length needs, with the draft's cache. Raises BudgetError."""
    with _in_words_of_budgets():
        least = least_kv_bytes(info.pool_facts, max_num_seqs=options.max_num_seqs, num_states=options.num_states)
    # The draft's cache is for as many tokens as the model's has with its dummy block.
    longest = (-(-info.max_model_len // info.block_size) + 1) * info.block_size
    return least if draft is None else least + draft.kv(longest)


def fewer_states(options: BudgetOptions) -> str:
    """One way out of a budget that is too small, for the middle of a list."""
    return f", lower num-states {options.num_states}" if options.num_states > 1 else ""


@contextmanager
def _in_words_of_budgets() -> Iterator[None]:
    """Turns refusals of pools into BudgetError."""
    try:
        yield
    except LlmcError as error:
        raise BudgetError(re.sub("kv_bytes|num_states", lambda name: name[0].replace("_", "-"), str(error))) from None


def kv_text(kv_bytes: int, info: ArtifactInfo, options: BudgetOptions, draft: DraftMemory | None) -> str:
    """What an engine has in a KV cache of that size. Raises BudgetError."""
    with _in_words_of_budgets():
        pools = info.pool_sizes(kv_bytes=kv_bytes, max_num_seqs=options.max_num_seqs, num_states=options.num_states)
    tokens = pools.num_blocks * info.block_size
    size = pools.num_bytes if info.state_bytes else kv_bytes
    text = f"KV cache {size_text(size)}: {pools.num_blocks} blocks of {info.block_size} tokens, {tokens} tokens, "
    text += f"{tokens / info.max_model_len:.1f} sequences of {info.max_model_len}"
    if info.state_bytes:
        text += f", and states of {pools.num_states} sequences"
    # The draft has a cache of its own.
    return text if draft is None else f"{text}; the draft's {size_text(draft.kv(tokens))} for as many tokens"


@dataclass(frozen=True, slots=True)
class _GraphMemory:
    """An artifact's graphs and what decides the bytes of a set of them, as for `graph_set_bytes`."""

    graphs: Sequence[GraphInfo]
    vocab_size: int
    cut_rows: int
    states_width: int

    def of(self, which: Iterable[int]) -> int:
        return graph_set_bytes((self.graphs[i] for i in which), self.vocab_size, self.cut_rows, self.states_width)


def _keep(
    memory: _GraphMemory, order: Sequence[int], base: Sequence[int], reserved: int, prompt_share: int
) -> set[int]:
    """Keeps the base, then, in `order`, each graph that fits: its phase stays in its share, and all stay in `reserved`.
    Once one phase has all its graphs, the other may use what it left."""
    graphs, kept = memory.graphs, set(base)
    shares = {True: prompt_share, False: reserved - prompt_share}

    def of(decode: bool, among: Iterable[int]) -> list[int]:
        return [i for i in among if (graphs[i].phase == "decode") == decode]

    def add(prompt: bool) -> None:
        for index in of(not prompt, order):
            mine = {*of(not prompt, kept), index}
            if memory.of(mine) <= shares[prompt] and memory.of({*kept, index}) <= reserved:
                kept.add(index)

    for prompt in (True, False):
        add(prompt)
    for prompt in (True, False):
        others = of(prompt, range(len(graphs)))
        if kept.issuperset(others):
            shares[prompt] = reserved - memory.of(others)
            add(prompt)
    return kept


def _graph_lines(memory: _GraphMemory, kept: set[int], graph_bytes: int) -> list[str]:
    graphs = memory.graphs
    parts = []
    for name, decode in (("prompt", False), ("decode", True)):
        all_of = [i for i in range(len(graphs)) if (graphs[i].phase == "decode") == decode]
        mine = [i for i in all_of if i in kept]
        used = size_text(memory.of(mine))
        parts.append(f"{len(mine)} of {len(all_of)} {name} graphs in {used}")
    lines = [f"{', '.join(parts)}; all in {size_text(graph_bytes)}, the arena is shared"]
    if memory.cut_rows and any(graphs[i].max_tokens >= memory.cut_rows for i in kept):
        whole = dataclasses.replace(memory, cut_rows=0)
        second = graph_bytes - whole.of(kept)
        lines.append(f"of that, {size_text(second)} for the second parts of steps of {memory.cut_rows} rows and more")
    missing = [str(graphs[i].bucket) for i in range(len(graphs)) if i not in kept]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        lines.append(f"not kept: {shown}; larger graphs or chunks serve what they would")
    return lines


def _share_up(part: int, whole: int) -> float:
    """part / whole, rounded up to three places so that it is safe as a limit."""
    return -(-part * 1000 // whole) / 1000


def size_text(count: int) -> str:
    """Bytes in readable units."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"
