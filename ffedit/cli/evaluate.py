"""`ffedit evaluate`: scores of facts on a model, before and after an edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich_click as click
from rich.text import Text

import ffedit
from ffedit.cli import options
from ffedit.cli.fact_options import fact_options
from ffedit.facts.fact import Fact
from ffedit.facts.reading import LeftOutRecords
from ffedit.files.atomic import write_text

UNLIKE = Text("The edit was computed in the model's chat template; measured without (--chat).", style="yellow")


@click.command()
@options.output_options
@fact_options
@options.asking_options
@click.option(
    "--edit", "edit_from", type=options.edit_folder, metavar="PATH", help="Measure before and after this edit."
)
@click.option("--edited", help="Compare with this checkpoint, edited by any tool: hub id or folder.")
@click.option("--text", type=options.FILE, help="Text file for drift and perplexity.  [default: sampled text]")
@click.option("--explain", is_flag=True, help="Explain each wrong answer of --edit: did its key or its value fail?")
@options.html_option
def evaluate(
    facts: list[Fact],
    left_out: Sequence[LeftOutRecords] = (),
    *,
    load_model: options.LoadModel,
    edit_from: Path | None,
    edited: str | None,
    text: Path | None,
    explain: bool,
    html: Path | None,
    surface: options.Surface,
) -> None:
    """Score the facts of FACTS (files of any shape, a data set, or -) on a model."""
    if edit_from is not None and edited is not None:
        raise click.UsageError("give either --edit or --edited")
    if explain and edit_from is None:
        raise click.UsageError("--explain takes an edit apart; give it with --edit")

    from ffedit.cli import result
    from ffedit.display.terminal.explanation import explanation_view
    from ffedit.display.terminal.scores import all_scores, verdict_view, what_it_says

    group = options.join(surface)
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit)
    if edit is not None and edit.in_chat and not editable.chat:
        surface.show(UNLIKE)
    other = load_model(other=edited) if edited is not None else None
    with surface.progress() as progress:
        report = ffedit.evaluate(
            editable, facts, edit, progress=progress, edited=other, text=text, full=True, process_group=group
        )
    group.disband()
    explanation = None
    if explain and edit is not None and group.first:
        with surface.progress() as progress:
            explanation = ffedit.explain(editable, facts, edit, progress=progress)
    why = None if explanation is None else explanation_view(explanation)
    surface.show(all_scores(report), what_it_says(report), why, verdict_view(report, edit, editable))
    evaluated = result.evaluated(editable, report, left_out, explanation)
    surface.write_json(evaluated)
    if html is not None and group.first:
        from ffedit.display.html.result import result_page

        write_text(html, result_page(evaluated))
