"""`llmc inspect --dry-run`: the architecture that a compilation would find in a model, from config.json alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.dry_run import DryRun


def dry_run_command(
    model: Path,
    *,
    as_json: bool,
    allow_unknown_config: bool,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: bool,
) -> None:
    """Prints the architecture of `model`. Raises the errors that a compilation raises before it compiles kernels."""
    from llmc.model_artifact import require_compiler

    require_compiler("llmc inspect --dry-run needs the compiler")
    from llmc.cli.render.compile_progress import progress_bar
    from llmc.compiler.config import CompileConfig
    from llmc.compiler.dry_run import dry_run

    config = CompileConfig(
        model=model,
        output=model,
        allow_unknown_config=allow_unknown_config,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
    )
    with progress_bar() as progress:
        found = dry_run(config, progress)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    for note in found.notes:
        print(f"llmc: note: {note}", file=sys.stderr)
    _print_table(model, found)


def _stages(found: DryRun) -> dict[str, str]:
    """Rows on layers and weights of each stage."""
    stages = zip(found.stage_layers, found.stage_weight_bytes, strict=True)
    return {
        f"weights, each rank of stage {number}": f"{layers} layers, {format_bytes(nbytes)}"
        for number, (layers, nbytes) in enumerate(stages)
    }


def _print_table(model: Path, found: DryRun) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(title=f"{model}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    of_model = "" if found.max_model_len == found.model_len else f", the model's is {found.model_len:,}"
    each = "" if found.ranks == 1 else f", each of {found.ranks} ranks"
    rows = {
        "model_type": found.model_type,
        "parameters": f"{found.parameters:,}",
        f"FLOPs a token{each}": f"{found.flops_per_token:,}",
        f"attention FLOPs a token, after {found.max_model_len:,}{each}": f"{found.attention_flops_per_token:,}",
        f"weights ({found.act_dtype})": format_bytes(found.weight_bytes),
        **({"weights, each rank": format_bytes(found.rank_weight_bytes)} if each and not found.stage_layers else {}),
        **_stages(found),
        f"KV cache a token ({found.kv_dtype}){each}": format_bytes(found.kv_bytes_per_token),
        **({f"states of a sequence{each}": format_bytes(found.state_bytes)} if found.state_bytes else {}),
        "context": f"{found.max_model_len:,} tokens{of_model}",
        "target": found.target,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    table.add_section()
    for phase, buckets in found.buckets.items():
        if buckets:
            range_ = buckets[0] if len(buckets) == 1 else f"{buckets[0]} to {buckets[-1]}"
            table.add_row(f"{phase} buckets", f"{len(buckets)}, {range_}")
    phase = "decode" if found.buckets["decode"] else "prefill"
    table.add_row(f"commands of a {phase} step", f"{found.commands:,}, of {found.kernels} kernels")
    table.add_row("compile time, estimated", f"{found.compile_s:.0f} s")
    print_table(table)
