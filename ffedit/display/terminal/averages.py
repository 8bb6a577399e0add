"""Averages over facts in a terminal: effects by the role of a token, and how they relate to edits in each layer.

The layer where a fact is recalled and the one where it is best edited can differ (Hase et al. 2023, arXiv 2301.04213),
so tracing and a sweep over layers are shown side by side, with their rank correlation in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ffedit.display.picture import Picture, Row, restored, runs
from ffedit.display.terminal.heat_map import HeatMap
from ffedit.display.terminal.model_table import plain_table
from ffedit.facts.text import counted, number, quoted
from ffedit.layer_choice.calibrate import Choice, LayerScore
from ffedit.layer_choice.choose import Sweep
from ffedit.locator import TraceSet
from ffedit.locator.aggregate import Aggregate, rank_correlation

MOST_UNKNOWN = 3
MOST_PROMPT = 48
# Rank correlations in absolute value: none below WEAK, "somewhat" below STRONG, "clearly" from STRONG on.
WEAK, STRONG = 0.3, 0.7


def averages_table(aggregate: Aggregate) -> RenderableType:
    """Render roles × layers as a heat map; beside each role its strongest layer with the effect and its interval."""
    level = f"{aggregate.level:.0%}"
    best = aggregate.effects.argmax(1)
    columns = [(f"most [{level}]", "layer", "n")]
    for i, layer in enumerate(best):
        ends = f"[{number(aggregate.low[i, layer])}, {number(aggregate.high[i, layer])}]"
        columns.append((f"{number(aggregate.effects[i, layer])} {ends}", str(layer), str(aggregate.counts[i])))
    widths = [max(len(cells[i]) for cells in columns) for i in range(3)]
    beside = tuple(f"{a:<{widths[0]}} {b:>{widths[1]}} {c:>{widths[2]}}" for a, b, c in columns)
    shown = Picture(
        rows=tuple(
            Row(role, effects, role.endswith("subject"))
            for role, effects in zip(aggregate.roles, aggregate.effects, strict=True)
        ),
        title=(
            f"Causal trace of {restored(aggregate)}, average of {counted(aggregate.facts, 'fact')}",
            f"{runs(aggregate.metric, 'answer', aggregate.clean, aggregate.corrupted)} "
            f"[{number(aggregate.total.low)}, {number(aggregate.total.high)}]",
            f"Corruption: {aggregate.corruption}",
            f"In brackets: {level} bootstrap intervals",
        ),
        layer=aggregate.layer,
        depth=aggregate.effects.shape[1],
        metric=aggregate.metric,
    )
    lines: list[RenderableType] = [HeatMap(shown, beside)]
    if aggregate.unknown:
        lines.append(Text(_set_apart(aggregate.unknown), style="yellow"))
    return Group(*lines)


def _set_apart(unknown: Sequence[str]) -> str:
    are, their = ("is", "its answer") if len(unknown) == 1 else ("are", "their answers")
    named = ", ".join(quoted(prompt, MOST_PROMPT) for prompt in unknown[:MOST_UNKNOWN])
    more = f" and {len(unknown) - MOST_UNKNOWN} more" if len(unknown) > MOST_UNKNOWN else ""
    facts = counted(len(unknown), "fact")
    return f"{facts} {are} set apart because the model does not give {their} by itself: {named}{more}"


def compare_layers(sweep: Sweep) -> RenderableType:
    """Render tracing and a sweep of edits side by side, one row per layer, with the layer that each would choose."""
    table = _layers_table(sweep.rows, {"tracing": sweep.traced, "sweep": sweep.layer})
    lines = [f"All edits with {sweep.method}, {counted(sweep.facts, 'fact')}.", _correlation(sweep.correlation)]
    if missing := _missing(sweep.rows):
        lines.append(missing)
    return Group(table, Text(""), *map(Text, lines))


def candidates_table(choice: Choice) -> RenderableType:
    """Render the layers that were tried for a model, one row each, with the layer that each criterion would choose."""
    ways = {"tracing": choice.traced, "published": choice.prior, "edits": choice.layer}
    return _layers_table(choice.rows, ways)


def _layers_table(rows: Sequence[LayerScore], ways: Mapping[str, int | None]) -> Table:
    table = plain_table()
    for heading in ("layer", "trace effect", "efficacy", "paraphrase", "specificity", "score"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("choice of", no_wrap=True)
    for row in rows:
        marks = [name for name, layer in ways.items() if layer == row.layer]
        values = (row.effect, row.efficacy, row.paraphrase, row.specificity, row.score)
        cells = [Text("" if value is None else number(value)) for value in values]
        table.add_row(Text(str(row.layer)), *cells, Text(", ".join(marks)), style="bold" if marks else "")
    return table


def _missing(rows: Sequence[LayerScore]) -> str:
    """Name the rates that the facts have no prompts for; an empty string where all were measured."""
    names = [n for n in ("efficacy", "paraphrase", "specificity") if all(getattr(row, n) is None for row in rows)]
    if not names:
        return ""
    score = "there is no score" if "efficacy" in names else "the score is of the others"
    return f"Not measured, for want of prompts: {' and '.join(names)}; {score}."


def agreement(estimated: TraceSet, exact: TraceSet) -> str:
    """Say how well first-order estimates of a few facts keep the order of the exact effects (Spearman)."""
    found = []
    for guess, true in zip(estimated.traces, exact.traces, strict=True):
        start = true.subject[0]
        found.append(rank_correlation(guess.effects[:, start:].ravel(), true.effects[:, start:].ravel()))
    ranks = [rank for rank in found if rank is not None]
    if not ranks:
        return "Estimates and exact effects could not be compared: all alike."
    mean = number(sum(ranks) / len(ranks))
    same = "the same layer" if estimated.layer == exact.layer else f"layer {estimated.layer} for {exact.layer}"
    return (
        f"First-order estimates of {restored(exact.traces[0])}: rank correlation with the exact effects {mean} "
        f"(Spearman over tokens and layers, mean of {counted(len(ranks), 'fact')}); they choose {same}."
    )


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
