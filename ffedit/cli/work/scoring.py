"""Scores of facts on a model, before and after an edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work import result
from ffedit.cli.work.model import load_edited, load_model
from ffedit.display.html.result import result_page
from ffedit.display.terminal.explanation import explanation_view
from ffedit.display.terminal.scores import all_scores, verdict_view, what_it_says
from ffedit.facts.fact import Fact
from ffedit.facts.reading import LeftOutRecords
from ffedit.files.atomic import write_text
from ffedit.inference.distributed import process_group

UNLIKE = Text("The edit was computed in the model's chat template, but is measured without (--chat).", style="yellow")


def evaluate(
    facts: list[Fact],
    left_out: Sequence[LeftOutRecords] = (),
    *,
    model: ModelOptions,
    edit_from: Path | None,
    edited: str | None,
    text: Path | None,
    explain: bool,
    html: Path | None,
    surface: Surface,
) -> None:
    """Score facts on a model, before and after the edit of a folder, or on another checkpoint."""
    group = process_group()
    edit, editable = load_edited(edit_from, model, surface)
    if edit is not None and edit.in_chat and not editable.chat:
        surface.show(UNLIKE)
    other = None if edited is None else load_model(model.of(edited), surface, show=False)
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
        write_text(html, result_page(evaluated))
