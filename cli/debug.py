"""`llmc debug`: values that each command of a graph writes, and where two artifacts of one model diverge."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from llmc.runtime.debug.diff import Compared, Diff

_HELP = """Look into a graph: dump the results of its commands, or find where two artifacts of one model differ.

\b
Examples:
  llmc debug diff reference.llmc model.llmc --prompt "Once upon a time"
  llmc debug dump model.llmc --ids 1,2,3 -o tensors
"""
_DIFF_HELP = """Run two artifacts of one model over the same tokens and compare the results of their commands.

The artifacts may differ in target, scheme, ladder or version. Tensors are compared in the order of the graph. If one
differs by more than the bound, the first such tensor is named with the element that differs most, and the exit code is
1. `--target reference` compiles plain kernels to compare others with.

\b
Examples:
  llmc compile models/qwen2.5-0.5b -o reference.llmc --target reference
  llmc debug diff reference.llmc qwen.llmc --prompt "Once upon a time"
  llmc debug diff bf16.llmc w8a8.llmc --ids 1,15,20 --step 3 --bound 0.05
  llmc debug diff old.llmc new.llmc --ids 1,15,20 --bound 0 --json
"""
_DUMP_HELP = """Write the results of every command of a step as NumPy files, one per tensor, with an index.json.

\b
Examples:
  llmc debug dump qwen.llmc --prompt "Once upon a time" -o tensors
  llmc debug dump qwen.llmc --ids 1,15,20 --step 2 --only layers.0 -o tensors
"""
DEFAULT_BOUND = 0.02
_PROMPT = typer.Option(None, metavar="TEXT", help="Text to run; needs the artifact's tokenizer.")
_IDS = typer.Option(None, metavar="LIST", help="Token ids to run instead of a text.")
_STEP = typer.Option(
    0, min=0, metavar="N", help="Step to compare: the Nth greedy token after the prompt; 0: the prompt."
)


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    debug = typer.Typer(no_args_is_help=True, help=_HELP)
    debug.command("diff", help=_DIFF_HELP)(diff_command)
    debug.command("dump", help=_DUMP_HELP)(dump_command)
    app.add_typer(debug, name="debug")


def diff_command(
    a: Path = typer.Argument(..., metavar="A", help="Reference artifact."),
    b: Path = typer.Argument(..., metavar="B", help="Artifact to check."),
    prompt: str | None = _PROMPT,
    ids: str | None = _IDS,
    step: int = _STEP,
    bound: float = typer.Option(
        DEFAULT_BOUND,
        min=0.0,
        metavar="X",
        help="Largest allowed difference, relative to the tensor's largest magnitude.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print every tensor's errors as JSON on stdout."),
) -> int:
    from llmc.runtime.debug.diff import diff_artifacts

    found = diff_artifacts(a, b, _tokens(a, prompt, ids), step)
    if as_json:
        print(json.dumps(found.as_dict(bound), indent=2))
    else:
        _print_diff(found, bound)
    return 0 if found.first(bound) is None else 1


def dump_command(
    artifact: Path = typer.Argument(..., metavar="ARTIFACT", help="Directory made by llmc compile."),
    output: Path = typer.Option(..., "-o", "--output", metavar="DIR", help="New or empty directory for the files."),
    prompt: str | None = _PROMPT,
    ids: str | None = _IDS,
    step: int = _STEP,
    only: str = typer.Option("", metavar="TEXT", help="Only tensors whose name contains TEXT."),
) -> None:
    from llmc.runtime.debug.dump import dump_step

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"--output {output} is there and not empty; name a new folder")
    written = dump_step(artifact, _tokens(artifact, prompt, ids), step, output, only)
    if not written:
        raise typer.BadParameter(f"--only: no tensor has {only!r} in its name")
    typer.echo(f"{output}: {written} tensors")


def _tokens(artifact: Path, prompt: str | None, ids: str | None) -> list[int]:
    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give either --prompt or --ids")
    if ids is not None:
        try:
            return [int(part) for part in ids.split(",")]
        except ValueError:
            raise typer.BadParameter(f"--ids {ids!r} is not a list of token ids: write them as in 1,15,20") from None
    from llmc.runtime.text.tokenizer import artifact_tokenizer

    tokenizer = artifact_tokenizer(artifact)
    if tokenizer is None:
        raise typer.BadParameter(f"{artifact} has no tokenizer: give --ids")
    return tokenizer.encode_prompt(prompt or "")


def _print_diff(found: Diff, bound: float) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(title=f"{found.graphs[0]} and {found.graphs[1]}, bound {bound:g}")
    for header in ("command", "op", "tensor", "shape", "max error", "relative", ""):
        table.add_column(header, justify="left" if header in ("op", "tensor", "") else "right")
    for tensor in found.tensors:
        mark = "differs" if tensor.differs(bound) else ""
        shape = "×".join(map(str, tensor.shape))
        table.add_row(
            str(tensor.a), tensor.op, tensor.name, shape, f"{tensor.max_error:.3g}", f"{tensor.error:.3g}", mark
        )
    print_table(table)
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            print(f"only in {side}: {', '.join(names)}")
    first = found.first(bound)
    if first is None:
        print(f"no tensor differs by more than {bound:g} of its largest magnitude")
    else:
        print(_sentence(first))


def _sentence(tensor: Compared) -> str:
    layer = f", layer {tensor.layer}" if tensor.layer >= 0 else ""
    return (
        f"first difference: command {tensor.a} ({tensor.op}{layer}), tensor {tensor.name}, element "
        f"{list(tensor.most.index)}: {tensor.most.a:.7g} and {tensor.most.b:.7g}, an error of {tensor.max_error:.3g}, "
        f"{tensor.error:.3g} of the largest magnitude"
    )
