"""A benchmark as a page: each headline score of all methods as bars, sequences as lines, then every table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ffedit.benchmark import BenchReport
from ffedit.benchmark.hardware import in_words
from ffedit.benchmark.tables import not_measured, notes, number, tables
from ffedit.display.html.charts import Chart, lines
from ffedit.display.html.rendering import render
from ffedit.display.panels import Line
from ffedit.evaluator import METRICS, NAMES
from ffedit.evaluator.verdict import fell
from ffedit.facts.text import counted
from ffedit.files.atomic import finite


@dataclass(frozen=True)
class Bar:
    """A figure of one method, or of "before": the mean and its interval as text, and the length of its bar.

    `low` and `high` are the ends of the interval as shares of the longest bar, None where there is none; `harm` is True
    where a score that should stay is clearly lower than before.
    """

    name: str
    figure: tuple[str, str]
    share: float
    low: float | None
    high: float | None
    harm: bool


def bench_page(report: BenchReport, command: str) -> str:
    """Render a report; `command` is the command line that made it."""
    rows = [method.last for method in report.methods.values()]
    measured = [name for name in NAMES if any(getattr(row.scores, name) is not None for row in rows)]
    scores = {name: list(_bars(report, name)) for name in measured}
    directions = {name: METRICS[name].direction for name in scores}
    run = report.run
    return render(
        "bench.html",
        title=f"{', '.join(report.methods)}: {counted(run['facts']['count'], 'fact')} in {run['model']['name']}",
        mode=run["mode"],
        notes=notes(report),
        groups={
            "What should stay": {name: scores[name] for name in scores if directions[name] in ("keep", "zero")},
            "What should change": {name: scores[name] for name in scores if directions[name] == "up"},
        },
        meanings={name: METRICS[name].meaning for name in scores},
        longest={name: _longest(report, name) for name in scores},
        curves=[chart for name in scores if (chart := _curve(report, name)) is not None],
        tables=tables(report),
        not_measured=not_measured(report),
        command=command,
        settings=json.dumps(finite(run.get("config", {})), indent=1, ensure_ascii=False),
        machines=[in_words(machine) for machine in run.get("hardware", [])],
    )


def _bars(report: BenchReport, name: str) -> Iterator[Bar]:
    """Yield the figures of one score: before, then by method."""
    longest, before = _longest(report, name), getattr(report.before.scores, name)
    for row in (report.before, *(method.last for method in report.methods.values())):
        value, interval = getattr(row.scores, name), row.intervals.get(name)
        if value is None:
            continue
        ends = "" if interval is None else interval.ends(number)
        low, high = (None, None) if interval is None else (interval.low / longest, interval.high / longest)
        harm = METRICS[name].direction == "keep" and before is not None and fell(before, value)
        yield Bar(row.name, (number(value), ends), value / longest, low, high, harm)


def _longest(report: BenchReport, name: str) -> float:
    """Return the value of a full bar: 1 of shares, else the largest value or end of an interval."""
    if METRICS[name].unit == "share":
        return 1.0
    rows = [method.last for method in report.methods.values()]
    highs = [row.intervals[name].high for row in rows if name in row.intervals]
    return max(*highs, *(getattr(row.scores, name) or 0.0 for row in rows), 0.0) or 1.0


def _curve(report: BenchReport, name: str) -> Chart | None:
    """Draw a score over the number of facts edited so far, a line for each method; None unless in a sequence."""
    labels = sorted({int(row.name) for method in report.methods.values() for row in method.curve})
    if METRICS[name].unit != "share" or len(labels) < 2:
        return None
    series = []
    for method, of in report.methods.items():
        rows = {int(row.name): row for row in of.curve}
        values = [getattr(rows[label].scores, name) if label in rows else None for label in labels]
        bounds = [rows[label].intervals.get(name) if label in rows else None for label in labels]
        low, high = ([None if b is None else getattr(b, end) for b in bounds] for end in ("low", "high"))
        whole = all(bound is not None for bound, value in zip(bounds, values, strict=True) if value is not None)
        series.append(Line(method, values, low, high) if whole else Line(method, values))
    return lines(name, series, list(map(str, labels)), "share", "facts edited")
