"""Flags of the warm-up that commands share; imports nothing, so that help stays quick."""

REPLAY_S = 5.0
ORDER_METAVAR = "auto|traffic|min_tokens|max_bs"
ORDER_HELP = " Or an order per phase: prefill=min_tokens,decode=max_bs."
SECONDS_HELP = (
    "Seconds, roughly, in which graphs are replayed; the others are then called without rows. 0: one of each kind."
)
SKIP_ENV = "LLMC_SKIP_WARMUP"
UTILIZATION_HELP = "Share of the available memory (a GPU's for a GPU), 0 to 1, for weights, graphs and KV pool."
UTILIZATION_NAMES = ("--memory-utilization", "--gpu-memory-utilization")
RESERVED_ENV, RESERVED_HELP = (
    "LLMC_GRAPH_RESERVED_MEM",
    "Share for graphs, of what the weights leave of that; default: 0.1.",
)
RATIO_ENV, RATIO_HELP = "LLMC_GRAPH_PROMPT_RATIO", "Share for prompt graphs, of the memory for graphs; default: 0.3."
