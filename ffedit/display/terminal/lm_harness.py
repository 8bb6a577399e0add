"""Figures of lm-evaluation-harness as a table in a terminal and as a folder with a report."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from ffedit.benchmark.lm_harness import Figure, Measured
from ffedit.display.terminal.tables import plain_table
from ffedit.files.atomic import finite, written

HEADINGS = ("task", "metric", "before", "after", "change", "stderr", "examples")


def figures_table(measured: Measured) -> Table:
    """Render one row per metric of a task; a change for the worse beyond the standard error is marked."""
    numbers = (Column(heading, justify="right") for heading in HEADINGS[2:])
    table = plain_table(*(Column(heading, overflow="fold") for heading in HEADINGS[:2]), *numbers)
    for figure in measured.figures:
        cells = [Text(cell) for cell in _cells(figure)]
        loss = -figure.change if figure.higher_is_better else figure.change
        if figure.higher_is_better is not None and loss > (figure.error_after or 0.0):
            cells[HEADINGS.index("change")].append(" !").stylize("bold red")
        table.add_row(*cells)
    table.caption = Text("stderr: of the edited model's figure; !: worse by more than that", style="dim not italic")
    table.caption_justify = "left"
    return table


def write_report(measured: Measured, folder: Path, force: bool = False) -> None:
    """Write `report.json`, with everything that the harness reports of both runs, and `report.md`, the table."""
    rows = (HEADINGS, ["---"] * len(HEADINGS), *map(_cells, measured.figures))
    examples = "all examples" if measured.limit is None else f"at most {measured.limit} examples of each task"
    chat = ", asked in the chat template" if measured.before.get("chat") else ""
    about = f"lm-evaluation-harness {measured.before['lm_eval']}, {examples}{chat}"
    table = [f"| {' | '.join(row)} |" for row in rows]
    note = f"{about}; stderr is that of the edited model's figure."
    lines = [f"# {measured.edited} against {measured.base}", "", *table, "", note, ""]
    with written(folder, force) as made:
        (made / "report.json").write_text(json.dumps(finite(measured.to_dict()), indent=2) + "\n", encoding="utf-8")
        (made / "report.md").write_text("\n".join(lines), encoding="utf-8")


def _cells(figure: Figure) -> list[str]:
    error = "" if figure.error_after is None else f"{figure.error_after:.4f}"
    examples = "" if figure.examples is None else str(figure.examples)
    numbers = [f"{figure.before:.4f}", f"{figure.after:.4f}", f"{figure.change:+.4f}"]
    return [figure.task, figure.metric, *numbers, error, examples]
