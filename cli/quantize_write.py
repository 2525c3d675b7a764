"""`llmc quantize -o`: writes a quantized checkpoint."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.options.calibration import WriteOptions
from llmc.cli.options.compile import quant_config
from llmc.cli.options.sample import read_sample
from llmc.cli.render.compile_progress import progress_bar
from llmc.quantize import SCHEMES
from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.calibration.request import CalibrationConfig, CalibrationReport, Estimate, RecipeReport

_POINTS = 12  # printed points of a recipe's curve


def write_command(
    model: Path,
    output: Path,
    scheme: str | None,
    group_size: int | None,
    asymmetric: bool | None,
    skip: str | None,
    options: WriteOptions,
) -> None:
    if scheme is not None and options.target_kl is not None:
        raise typer.BadParameter("--target-kl chooses the bits of each layer itself; leave out --scheme")
    from llmc.model_artifact import require_compiler

    require_compiler("llmc quantize needs the compiler")
    from llmc.compiler.calibration.request import DEFAULT_METHODS, METHODS, CalibrationConfig
    from llmc.quantize.export.registry import LAYOUTS

    if scheme is None:
        if options.target_kl is None:
            raise typer.BadParameter(f"--scheme is missing: say what to write, one of {', '.join(DEFAULT_METHODS)}")
        scheme = "w4a16"
    for flag, given, known in (
        ("--scheme", scheme, {**DEFAULT_METHODS, **SCHEMES}),
        ("--method", options.method, METHODS),
        ("--format", options.layout, LAYOUTS),
    ):
        if given is not None and given not in known:
            told = DEFAULT_METHODS if flag == "--scheme" else known
            raise typer.BadParameter(f"{flag} {given!r} is unknown: use {', '.join(told)}")
    quant = quant_config(scheme, group_size, asymmetric, skip, "--scheme")
    assert quant is not None
    text = None if options.calibration is None else read_sample(options.calibration, "--calibration")
    from llmc.compiler.calibration.driver import estimate_of, quantize_checkpoint
    from llmc.compiler.hub import locate

    with progress_bar() as progress:
        config = CalibrationConfig(
            model=locate(model, lambda done, total: progress("download", done, total)).path,
            output=output,
            quant=quant,
            method=options.method or DEFAULT_METHODS.get(scheme, "rtn"),
            text=text,
            layout=options.layout,
            samples=options.samples,
            sample_tokens=options.sample_tokens,
            damping=options.damping,
            jobs=options.jobs,
            target_kl=options.target_kl,
        )
        if options.dry_run:
            estimate, notes = estimate_of(config)
        else:
            report = quantize_checkpoint(config, progress)
    if options.dry_run:
        _say(notes)
        print(json.dumps(asdict(estimate), indent=2) if options.as_json else _estimated(config, estimate))
        return
    _say(report.notes)
    if options.as_json:
        print(json.dumps({**asdict(report), "output": str(report.output)}, indent=2))
    else:
        _print_report(report)
        if report.recipe is not None:
            _print_recipe(report.recipe)


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"llmc: note: {note}", file=sys.stderr)


def _estimated(config: CalibrationConfig, found: Estimate) -> str:
    time = f"{found.seconds / 60:.0f} minutes" if found.seconds >= 100 else f"{found.seconds:.0f} seconds"
    return (
        f"{config.method} on {found.tokens:,} tokens: about {time}, {format_bytes(found.memory_bytes)} of memory, "
        f"{format_bytes(found.work_bytes)} of work files, {format_bytes(found.output_bytes)} of weights"
    )


def _print_report(report: CalibrationReport) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(title=f"{report.output}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("scheme", report.scheme)
    table.add_row("method", report.method)
    if report.tokens:
        table.add_row("calibration", f"{report.tokens:,} tokens")
    resumed = f", {report.resumed} of them from before" if report.resumed else ""
    table.add_row("layers", f"{report.layers}{resumed}")
    table.add_row("weights", format_bytes(report.output_bytes))
    table.add_row("seconds", f"{report.seconds:.1f}")
    print_table(table)


def _print_recipe(recipe: RecipeReport) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(title="bits against divergence", title_justify="left")
    for column in ("bits a weight", "matrices, MiB", "KL, predicted", "KL, measured"):
        table.add_column(column, justify="right")
    places = {round(i * (len(recipe.curve) - 1) / (_POINTS - 1)) for i in range(_POINTS)}
    for place in sorted({*places, recipe.curve.index(recipe.chosen)}):
        point = recipe.curve[place]
        measured = f"{recipe.kl:.6f}" if point == recipe.chosen else ""
        size = f"{point.nbytes / (1 << 20):.2f}"
        table.add_row(f"{point.bits_per_weight:.2f}", size, f"{point.predicted_kl:.6f}", measured)
    print_table(table)
    for format, count in sorted(Counter(recipe.layers.values()).items()):
        print(f"{count:5} layers: {format}")
    tried = f", after {len(recipe.tries)} tries" if len(recipe.tries) > 1 else ""
    print(f"KL {recipe.kl:.6f} of at most {recipe.target_kl} on {recipe.measured_tokens:,} tokens{tried}")
