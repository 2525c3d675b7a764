"""Flags of the warm-up that commands share; imports nothing, so that help stays quick."""

REPLAY_S = 5.0
ORDER_METAVAR = "auto|traffic|min_tokens|max_bs"
ORDER_HELP = " Or one a phase, as prefill=min_tokens,decode=max_bs."
SECONDS_HELP = (
    "About so long graphs are replayed; then those whose kernels were replayed are walked through. 0: one of each."
)
SKIP_ENV = "LLMC_SKIP_WARMUP"
UTILIZATION_HELP = "Share of the available memory, a GPU's for one, for weights, graphs and KV pool, 0 to 1."
UTILIZATION_NAMES = ("--memory-utilization", "--gpu-memory-utilization")
RESERVED_ENV, RESERVED_HELP = (
    "LLMC_GRAPH_RESERVED_MEM",
    "Of what the weights leave of it, the share for graphs; 0.1 unless given.",
)
RATIO_ENV, RATIO_HELP = "LLMC_GRAPH_PROMPT_RATIO", "Of those, the share for prompt graphs; 0.3 unless given."
