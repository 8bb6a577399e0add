"""The report of a whole model as tables in a terminal and as Markdown, made of the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ffedit.algebra.bootstrap import Interval
from ffedit.display.terminal.tables import plain_table
from ffedit.facts.text import plain, quoted
from ffedit.inspector.model_view import Measure, ModelReport, Shift, Unit

MOST_SHIFTS = 8
MOST_PREFIX = 48
# Cells between two columns of a table.
GAP = 2


def cell(value: float | None, unit: Unit) -> str:
    """Format a value in its unit; "–" for None."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:+.1%}" if unit == "change" else f"{value:,.0f}"


def interval_cell(measure: Measure, layer: int) -> str:
    """Format a layer's value with its interval."""
    value, low, high = measure.values[layer], measure.low[layer], measure.high[layer]
    unit = measure.definition.unit
    if value is None or low is None or high is None:
        return cell(value, unit)
    return f"{cell(value, unit)} {Interval(value, low, high).ends(lambda end: cell(end, unit))}".rstrip()


def columns(measures: Sequence[Measure], layers: int, ends: bool) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a group, one row per layer, with the `ends` of intervals or without."""
    rows = []
    for layer in range(layers):
        cells = [interval_cell(m, layer) if ends else cell(m.values[layer], m.definition.unit) for m in measures]
        rows.append([str(layer), *cells])
    return ["layer", *(measure.definition.title for measure in measures)], rows


@dataclass(frozen=True)
class ByLayer:
    """A table of measures by layer, with intervals where the terminal is wide enough."""

    measures: Sequence[Measure]
    layers: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table: headings wrap, numbers do not."""
        table, width = _folding(*columns(self.measures, self.layers, ends=True))
        yield table if width <= options.max_width else _folding(*columns(self.measures, self.layers, ends=False))[0]


def _folding(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Table, int]:
    """Return a table whose headings wrap and whose cells do not, and its minimum width."""
    table = plain_table()
    least = [max(map(cell_len, [*heading.split(), *cells])) for heading, *cells in zip(headings, *rows, strict=True)]
    for heading, width in zip(headings, least, strict=True):
        table.add_column(heading, justify="right", min_width=width)
    for row in rows:
        table.add_row(*(Text(value, no_wrap=True) for value in row))
    return table, sum(least) + GAP * (len(least) - 1)


def model_view(report: ModelReport) -> Group:
    """Render the report for a terminal: a table for each group of measures."""
    parts: list[RenderableType] = [Text(_heading(report), style="bold"), Text("")]
    for group, measures in report.groups().items():
        parts += [Text(group[:1].upper() + group[1:], style="bold"), ByLayer(measures, report.layers), Text("")]
    parts += [Text(sentence) for sentence in sentences(report)]
    parts += [Text(f"  {shift_line(shift, report.note is not None)}") for shift in report.shifts[:MOST_SHIFTS]]
    return Group(*parts)


def sentences(report: ModelReport) -> list[str]:
    """Return the findings that are in no table, one sentence each."""
    surest, bins = report.surest, report.sureness
    findings = [] if report.note is None else [report.note]
    if surest.count and surest.agrees is not None:
        findings.append(
            f"Of the {surest.count} surest values, {surest.agrees} say what follows the key's top trigger, and "
            f"{surest.any_agrees} what follows one of its triggers."
        )
    if bins:
        ends = f"{bins[0].agreement:.1%}, the surest tenth in {bins[-1].agreement:.1%}"
        findings.append(f"The least sure tenth of values agrees in {ends}.")
    return [*findings, f"The last layer turns the prediction at {report.shifted:.1%} of the positions."]


def shift_line(shift: Shift, inside: bool) -> str:
    """Describe in one line a position where the last layer changes the prediction, marked «so» if `inside` a text."""
    text = shift.prefix
    start = max(0, text.find("«") - MOST_PREFIX // 2) if inside else len(text)
    shown = text[min(start, max(0, len(text) - MOST_PREFIX)) :][:MOST_PREFIX]
    turns = f"{shift.residual!r} → {shift.output!r} (the layer alone says {shift.added!r}; {shift.case})"
    return f"{quoted(shown, MOST_PREFIX + 2)}: {turns}"


def markdown(report: ModelReport) -> str:
    """Render the report as Markdown, with definitions and intervals."""
    brackets = "In brackets: 95% intervals over keys or positions, Wilson's of shares, otherwise the bootstrap's."
    lines = [f"# {plain(_heading(report))}", "", brackets, ""]
    for group, measures in report.groups().items():
        lines += [f"## {group[:1].upper() + group[1:]}", "", *_table(*columns(measures, report.layers, ends=True)), ""]
        for measure in measures:
            at = measure.definition
            paper = "not in the paper" if at.paper == "none" else f"section {at.paper}"
            lines.append(f"- *{at.title}* ({paper}): {at.text}")
        lines.append("")
    lines += ["## Sure values, and the last layer", "", *sentences(report), ""]
    if report.sureness:
        heads = ["max probability from", "to", "agreement", "values"]
        rows = [
            [f"{b.least:.3f}", f"{b.most:.3f}", f"{b.agreement:.1%} [{b.low:.1%}, {b.high:.1%}]", f"{b.count:,}"]
            for b in report.sureness
        ]
        lines += [*_table(heads, rows), ""]
    if report.shifts:
        heads = ["prefix", "residual", "feed-forward", "output", "in the text", "case"]
        rows = [[s.prefix, s.residual, s.added, s.output, s.next or "–", s.case] for s in report.shifts]
        lines += [*_table(heads, rows), ""]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(plain, cells))} |"

    return [line(headings), f"|{'---|' * len(headings)}", *map(line, rows)]


def _heading(report: ModelReport) -> str:
    name = report.model if report.note is None else f"{report.model}, {report.stack}"
    return f"{name}: {sum(report.memories):,} memories over {report.tokens:,} tokens of {report.corpus}"
