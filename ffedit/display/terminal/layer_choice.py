"""Show the layers that were compared by trial edits, and which one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ffedit.display.terminal.tables import left, plain_table, right
from ffedit.evaluator.metrics import SCORE_PARTS
from ffedit.facts.text import counted, number
from ffedit.layer_choice.calibrate import TIE, LayerChoice, LayerScore, tied


def trial_edits(choice: LayerChoice) -> RenderableType:
    """Render the layers that were tried by edits, one row each, and say in words which one is chosen."""
    fields, choices = ["layer", *SCORE_PARTS, "score"], {"auto": choice.auto.layer, "edits": choice.layer}
    table = plain_table(*right(*fields), *left("choice of"))
    for row in choice.rows:
        marks = [name for name, layer in choices.items() if layer == row.layer]
        values = [getattr(row, name) for name in fields[1:]]
        cells = ["" if value is None else number(value) for value in values]
        table.add_row(str(row.layer), *cells, ", ".join(marks), style="bold" if marks else "")
    return Group(table, Text(""), _chosen(choice), *_unmeasured(choice.rows))


def _chosen(choice: LayerChoice) -> Text:
    """Say which layer trial edits choose, on how many prompts, and which layers tie."""
    asked = {"fact": "efficacy", "paraphrase": "paraphrase", "neighbor": "specificity"}
    counts = ", ".join(counted(choice.prompts[rate], what) for what, rate in asked.items())
    layers, ties = [row.layer for row in choice.rows], [row.layer for row in tied(choice.rows)]
    words = f"best of layers {', '.join(map(str, layers))} by edits with {choice.method} ({counts}"
    words += f"; the model knows {choice.known} of {counted(choice.asked, 'fact')})"
    if len(ties) > 1:
        where = "a quarter of the depth" if choice.auto.row is None else "the published layer"
        listed = f"{', '.join(map(str, ties[:-1]))} and {ties[-1]}"
        words += f"; {listed} tie (within {TIE:g}), and {choice.layer} is nearest to {where}, {choice.auto.layer}"
    return Text.assemble((f"Layer {choice.layer}: ", "bold"), f"{words}. Take it with --layers {choice.layer}.")


def _unmeasured(rows: Sequence[LayerScore]) -> Iterator[Text]:
    if missing := [name for name in SCORE_PARTS if all(getattr(row, name) is None for row in rows)]:
        score = "there is no score" if "efficacy" in missing else "the score is that of the others"
        yield Text(f"Not measured, since no fact has prompts for it: {' and '.join(missing)}; {score}.")
