"""`ffedit evaluate`: scores of facts on a model, before and after an edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.text import Text

import ffedit
from ffedit.cli import result
from ffedit.cli.options import FILE, Surface, asking_options, fact_options, output_options
from ffedit.display.terminal import render
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.facts.fact import Fact
from ffedit.model.editable import Editable
from ffedit.safety.verdict import verdict

UNLIKE = Text("The edit was computed in the model's chat template; measured without (--chat).", style="yellow")


@click.command()
@fact_options
@asking_options
@click.option("--edit", "edit_from", type=FILE, help="Measure before and after this edit.")
@click.option("--edited", help="Or before, and on this checkpoint after, edited by anything: hub id or folder.")
@click.option("--text", type=FILE, help="Drift and perplexity on this text file.  [default: sampled from the model]")
@output_options
def evaluate(
    facts: list[Fact],
    unusable: Sequence[tuple[int, str]] = (),
    *,
    load_model: Callable[..., Editable],
    edit_from: Path | None,
    edited: str | None,
    text: Path | None,
    surface: Surface,
) -> None:
    """Score the facts of FACTS (a file in any known format, a data set, or -) on a model."""
    if edit_from is not None and edited is not None:
        raise click.UsageError("give either --edit or --edited")
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit.provenance["model"]) if edit is not None else load_model()
    unlike = edit is not None and edit.in_chat and not editable.chat
    surface.show(render.model_line(editable), UNLIKE if unlike else None)
    other = load_model(other=edited) if edited is not None else None
    with progress_bars(surface.quiet) as progress:
        report = ffedit.evaluate(editable, facts, edit, progress, other, text, full=True)
    surface.show(render.all_scores(report), render.what_it_says(report))
    if report.after is not None:
        surface.show(verdict(report, edit))
    surface.write_json(result.evaluated(editable, report, unusable))
