"""Comparison of editing methods on one model and one data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

import ffedit
from ffedit.benchmark import Mode
from ffedit.benchmark.settings import most_subjects
from ffedit.benchmark.tables import headline
from ffedit.cli.fact_options import Reading
from ffedit.cli.options import ModelOptions, Solving, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_model
from ffedit.cli.work.result import command_line
from ffedit.cli.work.solving import config_of, stats_of
from ffedit.display.html.bench import bench_page
from ffedit.display.terminal.scores import headline_table
from ffedit.errors import EditError
from ffedit.files.atomic import write_text
from ffedit.inference.distributed import process_group
from ffedit.layer_choice.choose import spread_below


def bench(
    sources: Sequence[str],
    reading: Reading,
    methods: list[str],
    mode: str,
    out: Path,
    limit: int | None,
    where: str | None,
    layers: str,
    spread: int,
    solving: Solving,
    model: ModelOptions,
    html: Path | None,
    surface: Surface,
    **kwargs: Any,
) -> None:
    """Write facts into a model by several methods, and measure each before and after."""
    configs = {name: config_of(solving, name, methods) for name in methods}
    workers, parsed = process_group(), Mode.parse(mode)
    field, _, value = (where or "").partition("=")
    sifted = reading.sift(
        sources,
        surface,
        together=parsed.name != "single",
        in_sequence=parsed.name == "sequential",
        where=None if where is None else (field, value),
        limit=limit,
    )
    facts = sifted.facts
    editable = load_model(model, surface)
    chosen = None
    if layers != "auto":
        (first, *more) = parse_layers(layers, len(editable.layers), ("auto",))
        if more:
            raise EditError(
                f"--layers {layers}: facts go to one layer, or with --spread also below it; give auto or one layer"
            )
        chosen = spread_below(first, spread)
    try:
        with surface.progress() as progress:
            report = ffedit.bench(
                editable,
                facts,
                methods,
                mode,
                out,
                layers=chosen,
                spread=spread,
                config=configs,
                stats=stats_of(solving, most_subjects(facts, parsed), editable, configs.values()),
                process_group=workers,
                progress=progress,
                unusable=[{"record": number, "reason": reason} for number, reason in sifted.left_out],
                **kwargs,
            )
    except KeyboardInterrupt as interrupt:
        raise click.Abort(
            f"interrupted: {out} keeps the results so far; the same command resumes the run"
        ) from interrupt
    missing = len(report.failures) + len(report.unusable)
    reasons = f"; {missing} could not be measured, for reasons given there" if missing else ""
    surface.show(headline_table(headline(report)), f"{out / 'report.md'} has all tables{reasons}")
    record = report.to_dict()
    surface.write_json({**record, "left_out": [*record["left_out"], *(kind.to_dict() for kind in sifted.by_kind)]})
    if html is not None and workers.first:
        write_text(html, bench_page(report, command_line()))
    workers.disband()
