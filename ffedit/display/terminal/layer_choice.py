"""The layer that is edited: which one and why, in words, and the layers that were compared as a table.

The layer where a fact is recalled and the one where it is best edited can differ (Hase et al. 2023, arXiv 2301.04213),
so tracing and a sweep over layers are shown side by side, with their rank correlation in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ffedit.display.terminal.recall import recalled, remarks, unknown_answers
from ffedit.display.terminal.tables import plain_table
from ffedit.facts.text import counted, number
from ffedit.layer_choice.calibrate import TIE, Choice, LayerScore
from ffedit.layer_choice.choose import Found, Sweep
from ffedit.locator import Trace, TraceSet

RATES = ("efficacy", "paraphrase", "specificity")
# Rank correlations in absolute value: none below WEAK, "somewhat" below STRONG, "clearly" from STRONG on.
WEAK, STRONG = 0.3, 0.7


def why_layer(found: Found, asked: str) -> RenderableType:
    """Say why this layer is edited; `asked` is the value of `--layers`. A sweep is a table as well."""
    if found.sweep is not None and not found.kept:
        return compare_layers(found.sweep)
    return Group(*reasons(found, asked))


def reasons(found: Found, asked: str) -> list[Text]:
    """Return the reasons for this layer, without tables; `asked` is the value of `--layers`."""
    choice, layer = found.choice, found.layer
    if found.sweep is not None:
        if not found.kept:
            return _sweep_in_words(found.sweep)
        over = f"remembered from a sweep with {found.sweep.method} over {counted(found.sweep.facts, 'fact')}"
        return [Text(f"Layer {layer}: {over} (`ffedit cache clear` forgets it).")]
    lines: list[Text] = []
    if choice is not None and asked != "auto":
        lines.append(Text("The trace shows no site at the subject's last token, so it does not tell the layer."))
    if choice is not None and choice.layer is None:
        lines.append(Text(f"{_too_few(choice)}."))
    if choice is not None and found.by == "model":
        lines.append(model_choice(choice, layer))
    if found.by == "depth":
        usual = f"the usual depth of published layers in a model of {len(found.traces.at_subject)}"
        lines.append(Text(f"Layer {layer}: {usual}, for want of a better."))
    if found.by == "only":
        lines.append(Text(f"Layer {layer}: the only one whose output reaches the answer."))
    shown = "trace" if found.by == "trace" and asked == "auto" else asked
    if found.by in ("model", "only", "depth"):
        shown = "model"  # explained above
    return [*lines, layer_choice(found.traces, layer, shown)]


def model_choice(choice: Choice, layer: int | None = None) -> Text:
    """Say which layer was chosen for a model and on what grounds; `layer` is taken where that one is not allowed."""
    if choice.layer is None:
        return Text(f"{_too_few(choice)}: none is chosen for it.")
    words = "" if layer in (None, choice.layer) else f"the layer allowed that comes next to {choice.layer}, "
    scores = ", ".join(f"{row.layer}: {'–' if row.score is None else number(row.score)}" for row in choice.rows)
    words += (
        f"chosen for this model with {choice.method} on {choice.made}, by the score of {choice.written} of the "
        f"{choice.known} calibration facts that it knows (of {choice.asked}) in layers {scores}"
    )
    if choice.prior is not None:
        words += f"; published is {choice.prior} ({choice.source})"
    top = max((row.score or 0.0 for row in choice.rows), default=0.0)
    if any(row.layer == choice.layer and (row.score or 0.0) < top for row in choice.rows):
        where = "the published layer" if choice.prior is not None else "a quarter of the depth"
        words += f"; less than {TIE:g} apart is not told apart, and {choice.layer} is nearest to {where}"
    heading = f"Layer {choice.layer if layer is None else layer}: "
    return Text.assemble((heading, "bold"), f"{words}. `ffedit cache clear` forgets it.")


def _too_few(choice: Choice) -> str:
    return f"The model knows {choice.known} of {choice.asked} calibration facts, too few to choose a layer on them"


def layer_choice(trace: Trace | TraceSet, chosen: int, asked: str = "trace") -> Text:
    """Say why the layer `chosen` is edited, and how far the trace can be trusted.

    `asked` is the origin of the choice: "trace", "model" (already explained elsewhere), or the user's own value.
    """
    best, site, why = trace.layer, trace.site, recalled(trace)
    heading = f"Layer {chosen}: "
    if asked == "model":
        heading = "The trace: "
        if site is not None:
            why += "; tracing agrees" if site == chosen else f"; tracing alone would have chosen {site}"
    elif asked == "trace" and site is None:
        heading = "The trace: "
    else:
        if chosen != best and site is not None:
            why = f"tracing would have chosen {best}: {why}"
        if asked != "trace":
            agrees = ", and tracing agrees: " if chosen == best and site is not None else "; "
            why = f"you asked for it{agrees}{why}"
    notes = (f"\n{remark}" for remark in remarks(trace, asked != "model"))
    warnings = ((f"\n{warning}", "yellow") for warning in unknown_answers(trace))
    return Text.assemble((heading, "bold"), f"{why}.", *notes, *warnings)


# Layers compared -----------------------------------------------------------------------------------


def compare_layers(sweep: Sweep) -> RenderableType:
    """Render tracing and a sweep of edits side by side, one row per layer, with the layer that each would choose."""
    table = _layers_table(sweep.rows, {"tracing": sweep.traced, "sweep": sweep.layer})
    return Group(table, Text(""), *_sweep_in_words(sweep))


def _sweep_in_words(sweep: Sweep) -> list[Text]:
    lines = [f"All edits with {sweep.method}, {counted(sweep.facts, 'fact')}.", _correlation(sweep.correlation)]
    if missing := [name for name in RATES if all(getattr(row, name) is None for row in sweep.rows)]:
        score = "there is no score" if "efficacy" in missing else "the score is of the others"
        lines.append(f"Not measured, for want of prompts: {' and '.join(missing)}; {score}.")
    return list(map(Text, lines))


def candidates_table(choice: Choice) -> Table:
    """Render the layers that were tried for a model, one row each, with the layer that each criterion would choose."""
    return _layers_table(choice.rows, {"tracing": choice.traced, "published": choice.prior, "edits": choice.layer})


def _layers_table(rows: Sequence[LayerScore], choices: Mapping[str, int | None]) -> Table:
    headings = ("layer", "trace effect", *RATES, "score")
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = plain_table(*columns, Column("choice of", no_wrap=True))
    for row in rows:
        marks = [name for name, layer in choices.items() if layer == row.layer]
        values = (row.effect, *(getattr(row, name) for name in RATES), row.score)
        cells = ["" if value is None else number(value) for value in values]
        table.add_row(str(row.layer), *cells, ", ".join(marks), style="bold" if marks else "")
    return table


def _correlation(correlation: float | None) -> str:
    if correlation is None:
        return "Whether tracing tells where to edit cannot be said: too few layers, or all of them alike."
    size = abs(correlation)
    if size < WEAK:
        says = "where tracing finds more, an edit scores neither better nor worse"
    else:
        better = "better" if correlation > 0 else "worse"
        says = f"where tracing finds more, an edit {'clearly' if size >= STRONG else 'somewhat'} scores {better}"
    return f"Rank correlation of trace effect and score over layers (Spearman): {number(correlation)}; {says}."
